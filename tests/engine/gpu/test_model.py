from __future__ import annotations

import pytest

from engine.gpu.model import recorded_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 8, 9, 64, 65, 100, 256, 1000])
def test_every_batch_has_a_size_that_is_not_much_larger(max_rows: int) -> None:
    sizes = recorded_sizes(max_rows)
    assert sizes[0] == 1
    assert sizes[-1] == max_rows
    for rows in range(1, max_rows + 1):
        size = next(size for size in sizes if size >= rows)
        assert size - rows < max(4, 16)
