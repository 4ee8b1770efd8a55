"""What several tests of the engine need."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine.cache import reach
from engine.scheduling import beginnings, state_marks


@pytest.fixture(scope="module")
def small_tiles() -> Iterator[None]:
    """Tiles of keys that texts of a dozen tokens leave behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reach, "TILE_TOKENS", 2)
        yield


@pytest.fixture(scope="module")
def near_states() -> Iterator[None]:
    """States that texts of a dozen tokens leave at several places."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_marks, "APART_TOKENS", 2)
        patch.setattr(state_marks, "TAIL_TOKENS", 1)
        yield


@pytest.fixture(scope="module")
def short_steps() -> Iterator[None]:
    """Steps that a few tokens make long enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(beginnings, "MIN_TOKENS", 4)
        yield
