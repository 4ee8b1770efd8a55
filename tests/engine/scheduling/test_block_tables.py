"""What requests take, name and give back, table by table; the scheduler's tests drive it through their lives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from engine.cache.prefix_index import landmark
from engine.config import ResolvedConfig
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.live_request import LiveRequest, rank_of
from engine.scheduling.step_costs import StepCosts
from tests.engine.scripted import a_config, a_request
from tests.engine.scripted_mover import ScriptedMover

pytestmark = pytest.mark.usefixtures("small_tiles")

WINDOWED = a_config(num_blocks=58, windows=(0, 4, 4))
PROMPT = tuple(range(20))
"""Five full blocks."""


def a_live(name: str, prompt: Sequence[int], **fields: object) -> LiveRequest:
    rank = rank_of(0, tag=0.0, arrival=0)
    return LiveRequest(request=a_request(name, prompt, **fields), rank=rank, tag=0.0, queued_at_s=0.0, output_ids=[])


def computed(tables: BlockTables, live: LiveRequest, config: ResolvedConfig) -> None:
    """Have all known tokens of an open request computed, by steps of the whole budget."""
    while live.num_wanted:
        assert tables.try_extend(live)
        start, live.num_computed = (
            live.num_computed,
            min(live.num_tokens, live.num_computed + config.max_batched_tokens),
        )
        tables.settle(live, start, live.num_computed)


def opened(config: ResolvedConfig, mover: ScriptedMover | None = None) -> tuple[BlockTables, LiveRequest]:
    """Return tables and a request that has computed `PROMPT` there."""
    tables, live = BlockTables(config, lambda: 0.0, mover), a_live("first", PROMPT)
    assert tables.try_open(live, spare=0)
    computed(tables, live, config)
    return tables, live


@pytest.mark.parametrize(("windows", "num_wanted"), [((0,), 5), ((0, 4, 4), 5 + 2 * 4)])
def test_an_admission_leaves_so_many_blocks_of_each_table(windows: tuple[int, ...], num_wanted: int) -> None:
    """Where a table forgets, an admission takes what the first step of sixteen tokens needs."""
    enough = a_config(num_blocks=num_wanted + 3 * len(windows), windows=windows)
    assert BlockTables(enough, lambda: 0.0).try_open(a_live("fits", PROMPT), spare=3)
    assert not BlockTables(enough, lambda: 0.0).try_open(a_live("does not", PROMPT), spare=4)


def test_room_beyond_what_is_known_leaves_so_many_blocks_of_each_table() -> None:
    tables, live = opened(WINDOWED)
    num_free = WINDOWED.num_blocks - round(tables.usage * WINDOWED.num_blocks)
    # A block more of each of three tables, and as many to be left.
    most = (num_free - 3) // 3
    assert tables.extend_beyond(live, 3, spare=most + 1) == 0
    assert tables.extend_beyond(live, 3, spare=most) == 3
    tables.check([live])


def test_windows_leave_behind_what_the_newest_token_leaves() -> None:
    tables, live = opened(WINDOWED)
    null = WINDOWED.num_blocks
    # Position 20 sees 17 to 20, and of its tile 16: that is in the fifth block.
    assert [[block == null for block in blocks] for blocks in live.tables] == [[False] * 5, *[[True] * 4 + [False]] * 2]
    assert round(tables.usage * WINDOWED.num_blocks) == 5 + 2


def test_how_much_is_to_be_computed_is_what_no_table_lacks() -> None:
    tables, first = opened(WINDOWED)
    assert tables.num_to_compute(a_live("other", (9, 9, 9))) == 3
    assert tables.num_to_compute(a_live("same", (*PROMPT, 1))) == 1
    tables.close(first)
    assert tables.num_to_compute(a_live("same", PROMPT)) == 4
    assert tables.num_to_compute(a_live("salted", PROMPT, salt="x")) == 20


def test_what_is_told_of_the_cache_is_its_first_table() -> None:
    tables, live = opened(WINDOWED)
    assert tables.landmarks.copy() == {landmark(name) for name in live.names_of(5, 4)}
    # The parts of one name in all tables are one mark, and so the stride is by how many names there may be.
    assert BlockTables(a_config(num_blocks=3 * 4096, windows=(0, 4, 4)), lambda: 0.0).landmarks.stride_blocks == 1
    assert BlockTables(a_config(num_blocks=3 * 4096), lambda: 0.0).landmarks.stride_blocks == 4


def test_what_windows_have_left_is_kept_below_too() -> None:
    mover = ScriptedMover([64])
    tables, live = opened(WINDOWED, mover)
    mover.block_tokens = WINDOWED.block_tokens
    mover.cells |= dict.fromkeys(range(WINDOWED.num_blocks * WINDOWED.block_tokens), 0)
    tables.tiers.advance(now_s=0.0, is_idle=True)
    assert len(mover._stores) == 2 * 4
    tables.close(live)
    tables.tiers.advance(now_s=0.0, is_idle=True)
    assert len(mover._stores) == 5 + 2 * 5
    # What is on its way down is not ordered once more.
    again = a_live("again", (*PROMPT, 1))
    assert tables.try_open(again, spare=0)
    tables.close(again)
    tables.tiers.advance(now_s=0.0, is_idle=True)
    assert len(mover._stores) == 5 + 2 * 5


def test_a_fetch_leaves_a_block_of_each_table_to_each_who_runs_and_who_waits() -> None:
    mover = ScriptedMover([64], steps=0)
    tables, live = opened(WINDOWED, mover)
    mover.block_tokens = WINDOWED.block_tokens
    mover.cells |= dict.fromkeys(range(WINDOWED.num_blocks * WINDOWED.block_tokens), 0)
    tables.close(live)
    for _ in range(2):
        tables.tiers.advance(now_s=0.0, is_idle=True)
        mover.tick()
    # Whatever the device held is overwritten, and ten blocks are left free.
    assert tables._pool.try_take(WINDOWED.num_blocks) is not None
    tables._pool.release(list(range(10)))  # type: ignore[arg-type]
    tables.bring_back([a_live("again", PROMPT)], 1, StepCosts())
    # Four blocks of the prompt, and the last of them in two tables more, would leave four.
    assert len([*tables.tiers.held()]) == 4


@pytest.mark.parametrize(("num_tokens", "again_s"), [(20, 0.25), (20000, 0.5)])
def test_a_longer_prompt_is_looked_up_more_seldom(num_tokens: int, again_s: float) -> None:
    tables, live = BlockTables(a_config(), lambda: 0.0, ScriptedMover([64])), a_live("long", range(num_tokens))
    tables.bring_back([live], 1, StepCosts())
    assert live.next_seek_s == pytest.approx(again_s, abs=0.001)


def test_a_loan_leaves_half_of_the_cache_free() -> None:
    tables = BlockTables(a_config(num_blocks=16), lambda: 0.0)
    assert tables.try_lend(8) is not None
    assert tables.try_lend(1) is None
