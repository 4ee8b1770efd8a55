from __future__ import annotations

from engine.metrics import SIZE_BOUNDS, Sizes


def test_a_size_is_counted_under_the_first_bound_that_holds_it() -> None:
    sizes = Sizes()
    for size in (0, 1, 2, 3, SIZE_BOUNDS[-1], SIZE_BOUNDS[-1] + 1):
        sizes.add(size)
    assert sizes.counts[:3] == [2, 1, 1]
    assert sizes.counts[-2:] == [1, 1]
    kept = sizes.copy()
    sizes.add(1)
    assert sum(kept.counts) == 6
