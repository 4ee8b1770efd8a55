from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def on_a_gpu(a_gpu: None) -> None:
    """Run every test here on a GPU, if only a simulated one."""
