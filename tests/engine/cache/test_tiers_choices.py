"""What goes down and what is kept there, what is brought back and how long that is waited for, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.cache import tiers
from engine.cache.blocks import BlockPool
from engine.cache.prefix_index import BlockName, Landmarks, PrefixIndex, landmark
from engine.cache.reach import Reach
from engine.cache.tiers import MAX_FETCHES, MIN_STORING, BlockOrder, CacheTiers
from engine.errors import OverloadError
from engine.ports import KeptBlock
from engine.request import FinishReason, RequestId
from engine.scheduling.forecast import Backlog
from tests.engine.cache.test_tiers import (
    CONFIG,
    PROMPT,
    begun,
    cached,
    end_hanging,
    forgotten,
    hang,
    names_of,
    others,
    serve,
    teach,
)
from tests.engine.scripted import Harness, ScriptedGate, a_config, a_request
from tests.engine.scripted_mover import ScriptedMover

LARGE = a_config(num_blocks=200)
"""Nothing in it is ever reused for want of room."""


def rest(harness: Harness) -> None:
    """A moment in which nobody asks for anything."""
    for _ in range(5):
        harness.step()


def held(harness: Harness, salt: str = "") -> list[bool]:
    """Which full blocks of PROMPT lie in a tier."""
    return [harness.scheduler.tiers.holds(name) for name in names_of(PROMPT, salt)]


def test_only_an_idle_engine_copies_all_that_has_a_name() -> None:
    mover = ScriptedMover([64])
    harness = Harness(LARGE, ScriptedGate(load_steps={"late": 10**9}), mover=mover)
    serve(harness, a_request("first", PROMPT))
    harness.add(a_request("waits", adapter="late"))
    rest(harness)
    harness.cancel("waits")
    harness.add(a_request("runs", (7, 7, 7), max_tokens=20))
    rest(harness)
    assert harness.emissions["runs"]
    assert not mover.slots[0]
    harness.finish()
    rest(harness)
    # Four blocks of the prompt, one of its last token and the answer, and what has come after them.
    assert len(mover.slots[0]) == 5 + (3 + 19) // 4


def test_what_somebody_wants_kept_goes_down_too() -> None:
    harness = Harness(LARGE, mover=ScriptedMover([64]))
    serve(harness, a_request("first", PROMPT, retention_s=100.0))
    rest(harness)
    assert all(held(harness))


def test_no_more_is_on_its_way_down_at_once_than_may_be() -> None:
    mover = ScriptedMover([200])
    harness = Harness(a_config(num_blocks=200, block_tokens=1), mover=mover)
    for salt in "abcd":
        serve(harness, a_request(salt, PROMPT, salt=salt))
    hang(mover)
    rest(harness)
    assert len(mover._stores) == MIN_STORING


def test_what_a_large_step_computes_goes_down_before_the_next_ones_need_its_blocks() -> None:
    """No more than 64 blocks went down in a step, so most of it was overwritten."""
    prompts = [tuple(range(first, first + 400)) for first in range(0, 4800, 400)]
    config = a_config(max_model_len=500, max_batched_tokens=400, num_blocks=500, vocab_size=10_000, max_num_seqs=1)
    harness = Harness(config, mover=ScriptedMover([10_000]))
    harness.add(*(a_request(str(prompt[0]), prompt, max_tokens=1) for prompt in prompts))
    harness.finish()
    assert [all(map(harness.scheduler.tiers.holds, names_of(prompt))) for prompt in prompts[:7]] == [True] * 7


def test_of_what_cannot_all_go_down_the_beginning_does() -> None:
    """Its end went down first, which is of no use without what was overwritten meanwhile."""
    harness = Harness(LARGE, mover=ScriptedMover([64]))
    harness.scheduler.tiers._max_storing = 2
    serve(harness, a_request("first", PROMPT))
    harness.step()
    harness.step()
    assert held(harness) == [True, True, False, False]


@pytest.mark.usefixtures("small_tiles")
def test_what_is_behind_a_window_goes_down_after_all_else() -> None:
    """It was released first and went down first, and the beginnings of prompts were overwritten meanwhile."""
    harness = Harness(replace(LARGE, windows=(0, 5)), mover=ScriptedMover([64]))
    harness.scheduler.tiers._max_storing = 4
    serve(harness, a_request("first", PROMPT))
    harness.step()
    harness.step()
    assert held(harness) == [True, True, True, True]


def test_a_tier_that_is_full_keeps_the_beginning_of_a_chain() -> None:
    """Without it what follows is of no use."""
    harness = Harness(LARGE, mover=ScriptedMover([2]))
    serve(harness, a_request("first", PROMPT))
    rest(harness)
    assert held(harness) == [True, True, False, False]


def test_a_tier_that_is_full_keeps_what_was_used_last() -> None:
    harness = Harness(LARGE, mover=ScriptedMover([10]))
    for number, salt in enumerate("abac"):
        serve(harness, a_request(str(number), PROMPT, salt=salt))
        rest(harness)
    assert all(held(harness, "a"))
    assert all(held(harness, "c"))


@pytest.mark.parametrize("token_s", [0.0001, 0.1])
def test_what_is_worth_less_than_a_step_is_computed(token_s: float) -> None:
    """The device has half of it; the whole of it would be worth it."""
    harness = begun(ScriptedMover([64]))
    teach(harness, token_s=token_s)
    serve(harness, a_request("again", PROMPT))
    assert cached(harness, "again") == 8


def test_the_beginning_is_on_the_device_and_the_end_is_brought() -> None:
    mover = ScriptedMover([64], steps=3)
    harness = begun(mover)
    num_fetches, num_blocks = mover.num_fetches, harness.scheduler.tiers.num_fetched_blocks
    serve(harness, a_request("a", PROMPT), a_request("b", (*PROMPT[:16], 3, 2)))
    assert mover.num_fetches == num_fetches + 1
    assert harness.scheduler.tiers.num_fetched_blocks == num_blocks + 2
    assert cached(harness, "a") == cached(harness, "b") == 16


@pytest.mark.parametrize(
    ("is_begun", "num_free", "brought"), [(False, 5, [[0, 1, 2]]), (True, 5, [[2]]), (True, 4, []), (False, 2, [])]
)
def test_of_what_has_no_room_the_beginning_is_brought(is_begun: bool, num_free: int, brought: list[list[int]]) -> None:
    """Those that run, and who waits, each find a block free; what the device has of it is no longer free."""
    mover = ScriptedMover([64])
    harness = begun(mover) if is_begun else forgotten(mover)
    harness.add(a_request("runs", (tuple(range(19, -1, -1)) * 3)[: 4 * (16 - num_free) - 2]))
    harness.step()
    hang(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    names = names_of(PROMPT)
    assert [[names.index(order.name) for order in orders] for _, _, orders in mover._fetches] == brought
    end_hanging(mover)
    harness.finish()


@pytest.mark.parametrize(("block_s", "num_own"), [(0.1, 1), (2.0, 9), (100.0, 17)])
def test_what_a_tier_holds_counts_as_work_by_the_time_of_a_fetch(block_s: float, num_own: int) -> None:
    """A restarted server refused long chats with deadlines, and did so for good."""
    mover = ScriptedMover([64], steps=2)
    harness = forgotten(mover)
    teach(harness, token_s=1.0)
    mover.block_s = block_s
    request = a_request("again", PROMPT, deadline_s=10.0)
    outlook, admission = harness.scheduler.expected_hits.look(request), harness.scheduler.admission
    assert outlook.num_own == outlook.num_missing == num_own
    if num_own > 1:
        with pytest.raises(OverloadError):
            admission.check_time(request, outlook, Backlog(), 16, 0.0)
        return
    admission.check_time(request, outlook, Backlog(), 16, 0.0)
    serve(harness, request)
    assert cached(harness, "again") == 16


@pytest.mark.parametrize(("block_s", "losing", "num_own"), [(0.0, 1, [1, 17]), (100.0, 0, [17, 1])])
def test_what_a_request_has_to_compute_is_known_anew_when_its_fetch_has_ended(
    block_s: float, losing: int, num_own: list[int]
) -> None:
    """It waits for a row, and was taken for what it had seemed to be when it came."""
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    teach(harness, token_s=1.0)
    harness.add(*(a_request(f"runs{number}", max_tokens=6) for number in range(4)))
    harness.step()
    mover.block_s, mover._losing = block_s, losing
    harness.add(a_request("again", PROMPT))
    live = harness.scheduler._live[RequestId("again")]
    found, mover.block_s = [live.num_own], 0.0
    for _ in range(3):
        harness.step()
    assert [*found, live.num_own] == num_own
    harness.finish()


def test_a_fetch_leaves_room_for_who_comes_first() -> None:
    """It took so many blocks that an idle engine let nobody in until it was done."""
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    hang(mover)
    harness.add(a_request("first", tuple(range(20)) * 2 + tuple(range(12)), salt="z"), a_request("again", PROMPT))
    for _ in range(10):
        harness.step()
    assert harness.reason("first") is FinishReason.LENGTH
    assert [len(orders) for _, _, orders in mover._fetches] == [1]
    assert not harness.emissions["again"]
    end_hanging(mover)
    harness.finish()


def test_what_has_come_for_one_who_waits_is_not_overwritten_by_what_comes_for_the_next() -> None:
    """Where the cache had room for one of them, fetches overwrote each other, and all of it was computed."""
    now_s, mover = [0.0], ScriptedMover([64])
    harness = Harness(CONFIG, mover=mover, clock=lambda: now_s[0])
    prompts = {salt: tuple((3 * i + i // 7) % 20 for i in range(37)) for salt in "abc"}
    for salt, prompt in prompts.items():
        serve(harness, a_request(f"first {salt}", prompt, salt=salt))
        rest(harness)
    serve(harness, *others(6))
    mover._steps = 2
    harness.add(*(a_request(salt, prompt, salt=salt) for salt, prompt in prompts.items()))
    while not harness.scheduler.num_running:
        harness.step()
        now_s[0] += 0.3
    harness.finish()
    assert cached(harness, "a") == 36


def test_who_would_gain_little_by_a_fetch_does_not_wait_for_it() -> None:
    """A block, for the device has what comes before."""
    mover = ScriptedMover([64])
    harness = begun(mover)
    hang(mover)
    mover.block_s = 1.4
    teach(harness, token_s=0.5)
    harness.add(a_request("long", PROMPT), a_request("short", (*PROMPT[:12], 9, 9)))
    rest(harness)
    assert harness.reason("short") is not None
    assert not harness.emissions["long"]
    end_hanging(mover)
    harness.finish()


@pytest.mark.parametrize("is_first", [True, False])
def test_a_fetch_behind_another_is_expected_to_take_the_time_of_both(is_first: bool) -> None:
    """Each would be worth waiting for alone, but one thread reads a tier."""
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    hang(mover)
    mover.block_s = 1.0
    teach(harness, token_s=0.5)
    if not is_first:
        harness.add(a_request("before", others(1)[0].prompt_ids, salt="s0"))
    harness.add(a_request("again", PROMPT))
    rest(harness)
    assert (harness.reason("again") is None) == is_first
    end_hanging(mover)
    harness.finish()


@pytest.mark.parametrize(("worth_s", "patience_s"), [(0.01, 0.1), (2.0, 2.0), (100.0, 10.0)])
def test_a_fetch_is_waited_for_as_long_as_to_compute_would_take_within_bounds(
    worth_s: float, patience_s: float
) -> None:
    now_s, mover = [0.0], ScriptedMover([64])
    harness = forgotten(mover, clock=lambda: now_s[0])
    teach(harness, token_s=(worth_s + 1.0) / 16)
    hang(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    now_s[0] = 0.9 * patience_s
    rest(harness)
    assert not harness.emissions["again"]
    now_s[0] = 1.1 * patience_s
    rest(harness)
    assert harness.reason("again") is FinishReason.LENGTH
    end_hanging(mover)
    harness.finish()


def test_who_shares_little_with_a_long_fetch_waits_no_longer_than_for_that() -> None:
    """It waited for as long as the other one did: a short prompt behind a common beginning for up to ten seconds."""
    now_s, mover = [0.0], ScriptedMover([64])
    harness = forgotten(mover, clock=lambda: now_s[0])
    teach(harness, token_s=0.5)
    hang(mover)
    harness.add(a_request("long", PROMPT), a_request("short", (*PROMPT[:4], 9, 9)))
    harness.step()
    now_s[0] = 0.9
    rest(harness)
    assert not harness.emissions["short"]
    now_s[0] = 1.1
    rest(harness)
    assert harness.reason("short") is FinishReason.LENGTH
    assert not harness.emissions["long"]
    end_hanging(mover)
    harness.finish()


def test_a_disk_that_hangs_is_asked_for_no_more_than_may_be_on_its_way() -> None:
    now_s, mover = [0.0], ScriptedMover([64])
    harness = forgotten(mover, clock=lambda: now_s[0])
    for other in others(10)[6:]:
        serve(harness, other)
    hang(mover)
    before = mover.num_fetches
    for other in others(6):
        harness.add(a_request(f"{other.request_id} again", other.prompt_ids, salt=other.salt))
        for _ in range(10):
            harness.step()
            now_s[0] += 2.0
        assert harness.reason(f"{other.request_id} again") is FinishReason.LENGTH
    assert mover.num_fetches == before + MAX_FETCHES
    end_hanging(mover)
    harness.finish()


def test_what_a_fetch_was_to_go_on_from_goes_down_when_it_has_come_to_nothing() -> None:
    mover = ScriptedMover([64])
    harness = begun(mover)
    hang(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    harness.cancel("again")
    assert harness.scheduler.tiers.give_up_one()
    end_hanging(mover)
    rest(harness)
    assert all(held(harness))


def test_what_is_still_being_read_for_nobody_is_not_read_a_second_time() -> None:
    """The end of it hangs; its beginning has left the device since."""
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    serve(harness, a_request("begins", PROMPT[:9]))
    hang(mover)
    harness.add(a_request("again", PROMPT))
    harness.step()
    harness.cancel("again")
    assert harness.scheduler.tiers.give_up_one()
    serve(harness, a_request("other", tuple(range(19, -1, -1)) * 3, salt="z"))
    harness.add(a_request("later", PROMPT))
    harness.step()
    names = names_of(PROMPT)
    assert [[names.index(order.name) for order in orders] for _, _, orders in mover._fetches] == [[2, 3], [0, 1]]
    end_hanging(mover)
    harness.finish()
    assert cached(harness, "later") == 8


def test_who_is_sent_back_to_wait_may_fetch_again() -> None:
    now_s, mover = [0.0], ScriptedMover([64])
    harness = forgotten(mover, clock=lambda: now_s[0])
    harness.add(a_request("again", PROMPT, priority=1, max_tokens=46))
    for number in range(2):
        harness.add(a_request(f"runs{number}", (7, 7, number), max_tokens=60))
        while harness.reason(f"runs{number}") is None:
            harness.step()
            now_s[0] += 1.0
    harness.finish()
    assert harness.scheduler.counters.num_preemptions == 2
    assert mover.num_fetches == 3


def test_a_disk_that_hangs_keeps_nothing_from_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies abandoned meanwhile were not counted and kept slots of both tiers, until host memory held nothing."""
    monkeypatch.setattr(tiers, "MIN_STORING", 6)
    monkeypatch.setattr(tiers, "STORING_STEPS", 0)
    mover = ScriptedMover([64, 400])
    mover.hanging = {1}
    harness = forgotten(mover)
    assert all(held(harness))
    serve(harness, *others(24)[6:])
    assert sum(order.tier == 1 for _, order in mover._stores) == 6
    assert len(mover.slots[0]) == 64
    lately = others(22)[-1]
    serve(harness, a_request("again", lately.prompt_ids, salt=lately.salt))
    assert cached(harness, "again") == 16


def test_who_waits_for_a_disk_that_hangs_holds_up_nobody_whose_prefix_is_in_host_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tiers, "MAX_FETCHES", 1)
    mover = ScriptedMover([4, 64])
    harness = Harness(CONFIG, mover=mover)
    for salt in "ab":
        serve(harness, a_request(salt, PROMPT, salt=salt))
        rest(harness)
    harness.scheduler.tiers._max_storing = 0
    serve(harness, *others(6))
    mover.hanging = {1}
    harness.add(a_request("on disk", PROMPT, salt="a"))
    harness.step()
    harness.add(a_request("in memory", PROMPT, salt="b"))
    rest(harness)
    assert cached(harness, "in memory") == 16
    assert not harness.emissions["on disk"]
    end_hanging(mover)
    harness.finish()
    assert cached(harness, "on disk") == 16


@pytest.mark.parametrize("capacities", [[64], [64, 2], [2, 64]])
def test_landmarks_tell_what_lies_in_any_tier(capacities: list[int]) -> None:
    harness = forgotten(ScriptedMover(capacities))
    assert {*map(landmark, names_of(PROMPT))} <= harness.scheduler.landmarks.copy()


def test_landmarks_tell_nothing_of_what_lies_nowhere() -> None:
    mover = ScriptedMover([6])
    harness = Harness(CONFIG, mover=mover)
    serve(harness, a_request("first", PROMPT))
    rest(harness)
    assert all(held(harness))
    for other in others(6):
        serve(harness, other)
    assert not {*map(landmark, names_of(PROMPT))} & harness.scheduler.landmarks.copy()


def test_landmarks_tell_what_is_on_the_device_whatever_a_tier_has_lost() -> None:
    harness = Harness(LARGE, mover=ScriptedMover([2]))
    serve(harness, a_request("first", PROMPT))
    rest(harness)
    assert {*map(landmark, names_of(PROMPT))} <= harness.scheduler.landmarks.copy()


def test_landmarks_tell_nothing_of_what_could_not_be_read() -> None:
    mover = ScriptedMover([64])
    harness = forgotten(mover)
    mover._losing = 1
    harness.add(a_request("again", PROMPT))
    harness.step()
    harness.cancel("again")
    rest(harness)
    assert held(harness) == [False, True, True, True]
    assert landmark(names_of(PROMPT)[0]) not in harness.scheduler.landmarks.copy()


@pytest.mark.parametrize(("window", "most"), [(0, 2 * 10), (64, 6 * 16)])
def test_for_what_has_no_room_little_is_looked_up(window: int, most: int) -> None:
    """All of a long prompt was, several times; with windows, anew for each few blocks that it was shortened by."""
    prompt = tuple(range(20)) * 100
    names = names_of(prompt)

    class Kept(ScriptedMover):
        def contents(self) -> list[list[KeptBlock]]:
            return [[KeptBlock(name, slot, slot) for slot, name in enumerate(names)]]

    pool, marks, looked = BlockPool(100), Landmarks(100), []
    tiers = CacheTiers(pool, PrefixIndex(marks), marks, Reach([window], 4, 16), Kept([len(names)]))
    assert pool.try_take(88)
    asked = tiers.holds

    def counted(name: BlockName) -> bool:
        looked.append(name)
        return asked(name)

    tiers.holds = counted  # type: ignore[method-assign]
    tiers.try_fetch(names, spare=2, now_s=0.0, worth_s=lambda _: -1.0)
    assert 0 < len(looked) <= most


def test_what_a_request_found_that_failed_is_forgotten_by_all_tiers() -> None:
    """It failed by it, perhaps; from a disk it would come back after every restart."""
    harness = Harness(LARGE, mover=ScriptedMover([64, 64]), failing=frozenset({"bad"}))
    serve(harness, a_request("first", PROMPT))
    rest(harness)
    assert all(held(harness))
    harness.add(a_request("bad", PROMPT))
    harness.finish()
    rest(harness)
    assert not any(held(harness))
    assert not {*map(landmark, names_of(PROMPT))} & harness.scheduler.landmarks.copy()
    serve(harness, a_request("next", PROMPT))
    assert cached(harness, "next") == 0


class SlowMover:
    """The part of a mover that stores; a test says when."""

    capacities = (100,)

    def __init__(self) -> None:
        self.orders: list[BlockOrder] = []
        self.done: list[tuple[BlockOrder, bool]] = []

    def contents(self) -> list[list[Any]]:
        return [[]]

    def store(self, orders: Sequence[BlockOrder]) -> None:
        self.orders += orders

    def abandon(self, block: int) -> None:
        """Do nothing: the block has been read."""

    def stored(self) -> list[tuple[BlockOrder, bool]]:
        done, self.done = self.done, []
        return done

    def fetched(self) -> list[Any]:
        return []


def test_a_block_that_another_of_its_name_has_stored_meanwhile_holds_up_no_other() -> None:
    """It was taken for one that no tier has room for, and nothing went down any more."""
    mover, marks = SlowMover(), Landmarks(16)
    index = PrefixIndex(marks)

    def reuse(block: int) -> None:
        lower.overwrite(block)
        index.evict(block)

    pool = BlockPool(16, on_reuse=reuse)
    lower = CacheTiers(pool, index, marks, Reach([0], 4, 16), mover)  # type: ignore[arg-type]

    def compute(name: BlockName) -> None:
        (block,) = pool.try_take(1) or ()
        index.insert(name, block, 0)
        pool.release([block])
        lower.let_go([block])

    names = [BlockName(bytes([number]) * 32) for number in range(4)]
    compute(names[0])
    lower.advance(now_s=0, is_idle=True)
    pool.release(pool.try_take(16) or ())
    compute(names[0])
    mover.done.append((mover.orders.pop(), True))
    for name in names[1:]:
        compute(name)
    lower.advance(now_s=0, is_idle=True)
    assert [order.name for order in mover.orders] == names[1:]
