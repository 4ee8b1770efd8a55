"""Short prompts beside one that takes many steps: of 16 tokens in a step, it leaves them a half."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from engine.cache.prefix_index import BlockName
from engine.cache.reach import Reach
from engine.errors import OverloadError
from engine.scheduling import overtaking
from engine.scheduling.overtaking import MIN_RATIO
from tests.engine.scheduling.test_backlog import backlog_of
from tests.engine.scheduling.test_scheduler import assert_right, shape
from tests.engine.scripted import Harness, ScriptedGate, a_config, a_request

WIDE = a_config(max_model_len=512, num_blocks=400, max_num_seqs=8, max_batched_tokens=16)
LONG = tuple(1 + index * index % 23 for index in range(240))


def under_way(gate: ScriptedGate | None = None, num_rows: int = 8, **fields: object) -> Harness:
    """A prompt of 240 tokens, of which a step has computed 16."""
    harness = Harness(replace(WIDE, max_num_seqs=num_rows), gate)
    harness.add(a_request("long", LONG, **fields))
    assert shape(harness) == [("long", 0, 16)]
    return harness


def test_a_short_prompt_gets_its_first_token_at_once_and_the_long_one_the_rest_of_the_step() -> None:
    harness = under_way()
    short = a_request("short", (7, 8, 9))
    harness.add(short)
    assert shape(harness) == [("long", 16, 29), ("short", 0, 3)]
    assert harness.tokens("short")
    harness.finish()
    assert_right(harness, short, a_request("long", LONG))


def test_short_prompts_together_get_at_most_a_half_in_order_of_rank() -> None:
    harness = under_way()
    harness.add(*(a_request(name, (index,) * 6) for index, name in enumerate("abc", start=1)))
    assert shape(harness) == [("long", 16, 24), ("a", 0, 6), ("b", 0, 2)]
    # Who has begun decodes, and a prompt goes on as it began.
    assert shape(harness)[:3] == [("a", 6, 7), ("long", 24, 32), ("b", 2, 6)]


def test_an_endless_stream_of_short_prompts_makes_a_long_one_at_most_twice_as_long() -> None:
    harness = under_way()
    num_steps = 1
    while not harness.tokens("long"):
        harness.add(*(a_request(f"{num_steps} {index}", (index + 1,) * 4, max_tokens=1) for index in range(6)))
        harness.step()
        num_steps += 1
    assert num_steps <= 2 * len(LONG) / WIDE.max_batched_tokens


def test_a_prompt_of_more_than_a_fraction_waits_for_its_turn() -> None:
    harness = under_way()
    num_left = len(LONG) - 16
    harness.add(a_request("medium", (5,) * (num_left // MIN_RATIO + 1)))
    assert shape(harness) == [("long", 16, 32)]


def measured(num_rows: int = 8, **fields: object) -> Harness:
    """As `under_way`; a step takes a second."""
    harness = under_way(num_rows=num_rows, **fields)
    for _ in range(20):
        harness.scheduler.admission.costs.observe(num_decodes=1, num_prompt_tokens=0, took_s=1.0, now_s=0.0)
    return harness


@pytest.mark.parametrize("deadline_s", [20.0, 1e9])
def test_nobody_passes_while_a_deadline_is_at_risk(deadline_s: float) -> None:
    """What was promised relied on the order; one far off kept every document before questions."""
    passed, kept = [("long", 16, 29), ("short", 0, 3)], [("long", 16, 32)]
    harness = measured(deadline_s=deadline_s)
    harness.add(a_request("short"))
    assert shape(harness) == (passed if deadline_s > 100 else kept)
    harness = measured()
    harness.add(a_request("medium", (5,) * 40, deadline_s=deadline_s / 2), a_request("short"))
    assert shape(harness) == (passed if deadline_s > 100 else kept)


@pytest.mark.parametrize(
    ("num_rows", "deadlines", "passing"),
    [
        (2, (None,), "s"),
        (2, (1e9,), ""),
        (3, (1e9,), "s"),
        (4, (1e9, 1e9), "s"),
        # Whoever has a deadline counted on those before it, too; behind it, nobody was promised anything.
        (4, (None, 1e9), "s"),
        (3, (None, 1e9), ""),
        (3, (1e9, None), "s"),
    ],
)
def test_who_passes_takes_no_row_that_a_deadline_counts_on(
    num_rows: int, deadlines: tuple[float | None, ...], passing: str
) -> None:
    """A short prompt with a long answer kept a row from one that was to have it, until its deadline was over."""
    harness = measured(num_rows)
    waiting = [a_request(f"medium {i}", (5 + i,) * 40, deadline_s=at_s) for i, at_s in enumerate(deadlines)]
    harness.add(*waiting, a_request("s", (3, 4)), a_request("t", (4, 3)))
    assert [name for name, start, _ in shape(harness) if start == 0] == list(passing)


@pytest.mark.parametrize(("deadline_s", "passing"), [(None, "s"), (1e9, "")])
def test_nor_one_that_a_deadline_behind_it_counts_on(deadline_s: float | None, passing: str) -> None:
    """It counts on the order of all before it: their rows are free again at other times."""
    harness = measured(2)
    last = a_request("last", (6,) * 40, deadline_s=deadline_s)
    harness.add(a_request("medium", (5,) * 40), a_request("s", (3, 4)), last)
    assert [name for name, start, _ in shape(harness) if start == 0] == list(passing)


def test_it_is_looked_once_whether_a_deadline_is_at_risk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds of long prompts without room, each looked at all others in every step."""
    harness = Harness(replace(WIDE, max_num_seqs=1))
    harness.add(a_request("runs", max_tokens=9))
    harness.step()
    harness.add(*(a_request(str(number), LONG, deadline_s=1e9) for number in range(20)))
    looked: list[object] = []
    monkeypatch.setattr(harness.scheduler.admission, "is_at_risk", lambda live, now_s: looked.append(live))
    harness.step()
    assert len(looked) <= 20


def test_nobody_passes_a_deadline_while_it_is_not_known_what_a_step_takes() -> None:
    harness = under_way(deadline_s=1e9)
    harness.add(a_request("short"))
    assert shape(harness) == [("long", 16, 32)]


def test_nobody_passes_a_prompt_whose_tokens_are_scored() -> None:
    harness = Harness(WIDE)
    harness.add(a_request("long", LONG, num_prompt_logprobs=0))
    harness.step()
    begun = shape(harness)[0][2]
    harness.add(a_request("short"))
    assert shape(harness)[0][:2] == ("long", begun)
    harness.finish()


def test_a_long_prompt_that_waits_for_its_adapter_holds_back_nobody() -> None:
    harness = Harness(WIDE, ScriptedGate(load_steps={"slow": 5}))
    harness.add(a_request("long", LONG, adapter="slow"), a_request("medium", (5,) * 60))
    assert shape(harness) == [("medium", 0, 16)]


def test_long_prompts_that_wait_for_a_row_are_not_compared_with_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hundreds that waited, each was compared with all behind it, in every step."""
    harness = Harness(replace(WIDE, max_num_seqs=1))
    harness.add(a_request("runs", max_tokens=9))
    harness.step()
    harness.add(*(a_request(str(number), LONG) for number in range(20)))
    monkeypatch.setattr(overtaking, "passes", None)
    assert shape(harness) == [("runs", 3, 4)]


def test_a_prompt_without_room_in_the_cache_is_not_passed_by_others_that_wait() -> None:
    """They would take the blocks that it waits for."""
    harness = Harness(a_config(max_model_len=512, num_blocks=64, max_num_seqs=8, max_batched_tokens=16))
    harness.add(a_request("first", (3,) * 100, max_tokens=30))
    while not harness.tokens("first"):
        harness.step()
    harness.add(a_request("long", LONG), a_request("short"))
    while not harness.reason("first"):
        assert {name for name, _, _ in shape(harness)} == {"first"}
    assert shape(harness) == [("long", 0, 13), ("short", 0, 3)]


def test_a_prompt_that_passes_another_is_foretold_to_wait_for_as_much_as_it_has_itself() -> None:
    harness = under_way()
    harness.add(a_request("queued", LONG[::-1]))
    found = backlog_of(harness, a_request("comes", (1, 2, 3, 4)))
    assert [load.prompt_tokens for load in (*found.running, *found.waiting)] == [4, 4]
    pairs = [load.num_pairs for load in (*found.running, *found.waiting)]
    assert pairs == [4 * (16 + 240) / 2, 4 * 240 / 2]
    # In order of rank, if it has a deadline: nobody passes then.
    found = backlog_of(harness, a_request("comes", (1, 2, 3, 4), deadline_s=1e9))
    assert [load.prompt_tokens for load in (*found.running, *found.waiting)] == [224, 240]


def test_an_idle_server_with_one_long_prompt_takes_short_ones() -> None:
    harness = Harness(a_config(max_model_len=512, num_blocks=400, max_batched_tokens=16, max_queue_s=1.0))
    costs = harness.scheduler.admission.costs
    for _ in range(20):
        costs.observe(num_decodes=1, num_prompt_tokens=0, took_s=0.01, now_s=0.0)
        costs.observe(num_decodes=0, num_prompt_tokens=16, took_s=0.17, now_s=0.0)
    harness.add(a_request("long", LONG))
    harness.step()
    admission = harness.scheduler.admission
    for prompt, is_refused in [((1, 2, 3), False), ((1,) * 40, True)]:
        request = a_request("comes", prompt)
        outlook, backlog = harness.scheduler.expected_hits.look(request), backlog_of(harness, request)
        if is_refused:
            with pytest.raises(OverloadError):
                admission.check_time(request, outlook, backlog, 16, 0.0)
        else:
            admission.check_time(request, outlook, backlog, 16, 0.0)


@pytest.mark.parametrize(
    ("num_more", "ends"), [(3, {"a": 243, "b": 243, "c": 243}), (7, {"a": 247, "b": 247, "c": 242}), (12, {"a": 252})]
)
def test_prompts_whose_beginning_is_cached_begin_together(num_more: int, ends: dict[str, int]) -> None:
    """Each counted as one of many steps, and held up all behind it, although the step completed it."""
    harness = Harness(WIDE)
    harness.add(a_request("first", LONG, max_tokens=1))
    harness.finish()
    harness.add(*(a_request(name, (*LONG, *(index,) * num_more)) for index, name in enumerate("abc", start=1)))
    assert {name: end for name, _, end in shape(harness) if name in ends} == ends
    harness.finish()


def test_a_turn_of_a_chat_whose_past_is_cached_passes_a_document() -> None:
    harness = Harness(WIDE)
    harness.add(a_request("past", LONG[:120], max_tokens=1))
    harness.finish()
    harness.add(a_request("document", LONG[::-1]))
    harness.step()
    harness.add(a_request("turn", (*LONG[:120], 1, 2, 3)))
    assert shape(harness) == [("document", 16, 29), ("turn", 120, 123)]


def test_what_is_cached_of_a_prompt_that_waits_is_not_looked_up_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """For 24 long prompts with a common beginning, that was 35 ms of each step."""
    now_s, lookups = 0.0, []
    harness = Harness(WIDE, clock=lambda: now_s)
    harness.add(a_request("past", LONG[:120], max_tokens=1))
    harness.finish()
    harness.add(a_request("document", LONG[::-1]))
    harness.step()
    harness.add(a_request("waits", (*LONG[:120], *(5,) * 60)))
    longest = Reach.longest

    def looked_up(reach: Reach, names: Sequence[BlockName], has: Callable[[BlockName], bool]) -> int:
        lookups.append(now_s)
        return longest(reach, names, has)

    monkeypatch.setattr(Reach, "longest", looked_up)
    for _ in range(3):
        assert {name for name, _, _ in shape(harness)} == {"document"}
    assert lookups == [0.0]
    now_s = 1.0
    harness.step()
    assert lookups == [0.0, 1.0]


def test_a_turn_that_finds_no_room_does_not_hold_up_short_prompts() -> None:
    """What was cached of it was remembered for longer than that there was no room for the rest of it."""
    size, now_s = WIDE.block_tokens, 0.0
    past = tuple(1 + index * index % 23 for index in range(300 * size))
    document = tuple(1 + (index * 7 + index // 13) % 22 for index in range(750 * size))
    config = replace(WIDE, max_model_len=len(document) + 50, num_blocks=750 + 300 + 2)
    harness = Harness(config, clock=lambda: now_s)
    harness.add(a_request("past", past, max_tokens=1))
    harness.finish()
    harness.add(a_request("document", document[:-2], max_tokens=1))
    harness.step()
    harness.add(a_request("turn", (*past, 1, 2, 3), max_tokens=1))
    now_s += 0.001
    assert {name for name, _, _ in shape(harness)} == {"document"}
    harness.add(a_request("short", (7, 8, 9), max_tokens=1))
    now_s += 0.001
    assert "short" in {name for name, _, _ in shape(harness)}
