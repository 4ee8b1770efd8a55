"""A place for registries, new for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deployments.registry.place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
