"""What windows leave behind, against the definition: position by position."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.layout import TILE_TOKENS
from engine.cache.prefix_index import child_name, root_name
from engine.cache.reach import Reach, name_in
from kernels import architecture
from kernels.paged_attention.launch import decode_share, prefill_tile

windows = st.lists(st.sampled_from([0, 1, 2, 3, 7, 20]), min_size=1, max_size=3).map(tuple)
NAMES = [child_name(root_name(None, ""), [number]) for number in range(12)]


@pytest.mark.parametrize("block_tokens", [1, 16, 48, 128, 200])
@pytest.mark.parametrize("window", [1, 2, 100, TILE_TOKENS, TILE_TOKENS + 1])
def test_what_is_left_behind_is_in_no_tile_that_a_later_token_reads(window: int, block_tokens: int) -> None:
    reach = Reach((window,), block_tokens, 1)
    for position in range(4 * TILE_TOKENS):
        first_seen = next(key for key in range(position + 1) if key > position - window)
        first_read = first_seen - first_seen % TILE_TOKENS
        unread = [i for i in range(position + 1) if (i + 1) * block_tokens <= first_read]
        assert reach.num_left(window, position) == len(unread)
        assert reach.num_left(0, position) == 0


@given(windows, st.integers(1, 5), st.sets(st.tuples(st.integers(0, 2), st.integers(0, 11))), st.integers(0, 12))
def test_one_can_go_on_behind_the_longest_beginning_that_all_tables_show(
    windows: tuple[int, ...], block_tokens: int, missing: set[tuple[int, int]], count: int
) -> None:
    reach = Reach(windows, block_tokens, 1)
    here = {
        name_in(name, table)
        for table in range(len(windows))
        for i, name in enumerate(NAMES)
        if (table, i) not in missing
    }

    def shows(end: int) -> bool:
        """Whether each table has the blocks of all that the next position sees."""
        position = end * block_tokens
        return all(
            name_in(NAMES[seen // block_tokens], table) in here
            for table, window in enumerate(windows)
            for seen in range(max(0, position - window + 1) if window else 0, position)
        )

    found = reach.longest(NAMES[:count], here.__contains__)
    assert found == max(end for end in range(count + 1) if shows(end))
    for table, blocks in enumerate(reach.seen(found)):
        assert all(name_in(NAMES[i], table) in here for i in blocks)


@given(windows, st.integers(1, 8), st.integers(1, 30), st.integers(1, 200))
def test_no_request_ever_holds_more_than_the_most(
    windows: tuple[int, ...], block_tokens: int, step_tokens: int, num_tokens: int
) -> None:
    """Computed by full steps, one of which is always under way; then token by token."""
    reach = Reach(windows, block_tokens, step_tokens)
    computed = before = 0
    while computed < num_tokens:
        held = sum(reach.end(window, computed, num_tokens) - reach.num_left(window, before) for window in windows)
        assert held <= reach.most(num_tokens)
        before, computed = computed, min(num_tokens, computed + step_tokens)
    for length in range(num_tokens, num_tokens + 5):
        held = sum(reach.num_blocks(length) - reach.num_left(window, length - 1) for window in windows)
        assert held <= reach.resting(length) <= reach.most(length)
    capacity = reach.capacity(reach.most(num_tokens), 300)
    assert capacity >= num_tokens
    assert capacity == 300 or reach.most(capacity + 1) > reach.most(num_tokens)


def test_what_one_table_lacks_another_one_may_want_again() -> None:
    """The last table ends the beginning earlier, where the first one has a hole that it did not see before."""
    reach = Reach((2, 3), 1, 1)
    missing = {name_in(NAMES[1], 0), name_in(NAMES[2], 1)}
    assert reach.longest(NAMES[:4], lambda name: name not in missing) == 1


@pytest.mark.parametrize("windows", [(0,), (3,), (0, 3)])
def test_of_each_part_it_is_asked_once_if_the_tables_agree(windows: tuple[int, ...]) -> None:
    asked: list[bytes] = []
    here = {name_in(name, table) for name in NAMES[:6] for table in range(len(windows))}

    def has(name: bytes) -> bool:
        asked.append(name)
        return name in here

    assert Reach(windows, 1, 1).longest(NAMES, has) == 6
    assert len(set(asked)) == len(asked)


def test_a_step_fills_blocks_in_every_table() -> None:
    assert [Reach(windows, 4, 9).step_blocks for windows in ((0,), (0, 5, 5))] == [3, 9]


def test_names_of_parts_are_told_apart() -> None:
    parts = {name_in(name, table) for name in NAMES for table in range(8)}
    assert len(parts) == 8 * len(NAMES)
    assert name_in(NAMES[0], 0) == NAMES[0]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_no_kernel_reads_larger_tiles(target: str) -> None:
    with architecture.pretending(target):
        for head_dim, element_bytes in product((64, 80, 96, 128, 256, 512), (1, 2, 4)):
            widths = [decode_share(rows, head_dim, element_bytes).block_n for rows in (1, 64, 512)]
            for group in (1, 4, 8):
                tile = prefill_tile(group, head_dim, element_bytes, is_quantized=element_bytes == 1, has_window=True)
                widths.append(tile.block_n)
            assert all(TILE_TOKENS % width == 0 for width in widths)
