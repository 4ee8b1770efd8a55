"""What several tests of the engine need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.cache import reach


@pytest.fixture(scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles of keys that texts of a dozen tokens leave behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "TILE_TOKENS", 2)
        yield
