from __future__ import annotations

import dataclasses

import pytest

from engine.errors import RequestError
from engine.request import FinishReason, Pooling, Request, RequestId
from engine.scheduling.fair_queue import NEW_SHARE
from engine.scheduling.hopeless import DEADLINE_PASSED
from engine.scheduling.request_bounds import check_request
from tests.engine.scripted import Harness, a_config, a_request
from tests.oracles.naive_scheduler import EOS_IDS, answer_alone


def shape(harness: Harness) -> list[tuple[str, int, int]]:
    """One step: (request, start, end) of each row, in the plan's order."""
    plan = harness.step()
    return [] if plan is None else [(row.request.request_id, row.start, row.end) for row in plan.rows]


def assert_right(harness: Harness, *requests: Request) -> None:
    for request in requests:
        answer = answer_alone(request, harness.config.max_model_len)
        assert harness.tokens(request.request_id) == answer.token_ids
        assert harness.reason(request.request_id) == answer.reason


def sampled_id(request: Request) -> int:
    """A token that the request draws second."""
    return answer_alone(request, 64).token_ids[1]


# --- one request ---


def test_a_request_prefills_once_and_then_decodes_token_by_token() -> None:
    harness = Harness()
    harness.add(a_request("a", range(1, 6), max_tokens=3))
    assert [shape(harness) for _ in range(4)] == [[("a", 0, 5)], [("a", 5, 6)], [("a", 6, 7)], []]
    assert_right(harness, a_request("a", range(1, 6), max_tokens=3))
    harness.check_all_returned()


def test_a_prompt_over_the_budget_is_prefilled_in_chunks_and_samples_only_at_its_end() -> None:
    harness = Harness(a_config(max_batched_tokens=7))
    harness.add(a_request("a", range(1, 18), max_tokens=2))
    plans = [harness.step() for _ in range(4)]
    rows = [plan.rows[0] for plan in plans if plan is not None]
    assert [(row.start, row.end, row.samples) for row in rows] == [
        (0, 7, False),
        (7, 14, False),
        (14, 17, True),
        (17, 18, True),
    ]
    assert [row.is_admission for row in rows] == [True, False, False, False]


def test_steps_are_numbered_from_1_and_idle_plans_are_not_counted() -> None:
    harness = Harness()
    assert harness.step() is None
    harness.add(a_request("a", max_tokens=2))
    assert [plan.step_id for plan in (harness.step(), harness.step()) if plan is not None] == [1, 2]


def a_follower(name: str, **fields: object) -> Request:
    """One whose third to ninth token are forced, bar the third itself; so are the sixteenth and those after it."""
    return a_request(name, grammar="h", ignore_eos=False, seed=2, **{"max_tokens": 12} | fields)


def test_what_is_forced_comes_with_what_was_drawn_and_is_computed_as_a_chunk() -> None:
    harness = Harness()
    harness.add(a_follower("a"))
    assert [shape(harness) for _ in range(6)] == [
        [("a", start, end)] for start, end in [(0, 3), (3, 4), (4, 5), (5, 12), (12, 13), (13, 14)]
    ]
    assert [len(emission.token_ids) for emission in harness.emissions["a"]] == [1, 1, 7, 1, 1, 1]
    assert_right(harness, a_follower("a"))
    assert harness.scheduler.counters.forced_tokens == 6
    harness.check_all_returned()


def test_who_has_much_forced_on_it_holds_up_nobody_and_is_not_held_up() -> None:
    """Each of two has a token of every step, the rest goes by rank, to them before a prompt that came later."""
    harness = Harness(a_config(max_prefill_tokens_with_decodes=4))
    harness.add(a_request("d", max_tokens=20), a_follower("a"), a_follower("b"))
    for _ in range(3):
        harness.step()
    harness.add(a_request("late", range(1, 13)))
    assert shape(harness) == [("d", 5, 6), ("b", 5, 6), ("a", 5, 10)]
    assert shape(harness) == [("d", 6, 7), ("a", 10, 12), ("b", 6, 10)]
    assert shape(harness) == [("d", 7, 8), ("a", 12, 13), ("b", 10, 12), ("late", 0, 3)]
    harness.finish()
    assert_right(harness, a_follower("a"), a_follower("b"))


# --- the budget ---


def test_decodes_come_first_and_a_prefill_gets_what_they_leave() -> None:
    harness = Harness(a_config(max_batched_tokens=8))
    harness.add(a_request("a"), a_request("b"))
    harness.step()
    harness.add(a_request("c", range(1, 11)))
    assert shape(harness) == [("a", 3, 4), ("b", 3, 4), ("c", 0, 6)]


def test_a_budget_smaller_than_the_rows_keeps_requests_waiting_and_stalls_none_that_runs() -> None:
    harness = Harness(a_config(max_batched_tokens=2, max_num_seqs=3))
    requests = [a_request(name, (i + 1,), max_tokens=5) for i, name in enumerate("abc")]
    harness.add(*requests)
    for _ in range(5):
        harness.step()
    assert [len(harness.tokens(name)) for name in "abc"] == [5, 5, 0]
    harness.finish()
    assert_right(harness, *requests)


def test_prefill_tokens_beside_decodes_are_capped_where_one_asks_for_it() -> None:
    harness = Harness(a_config(max_prefill_tokens_with_decodes=3))
    harness.add(a_request("a", max_tokens=3))
    assert shape(harness) == [("a", 0, 3)]
    harness.add(a_request("b", range(1, 11)), a_request("c", range(5, 15)))
    assert shape(harness) == [("a", 3, 4), ("b", 0, 3)]
    assert shape(harness) == [("a", 4, 5), ("b", 3, 6)]
    assert shape(harness) == [("b", 6, 10), ("c", 0, 10)], "nobody decodes any more"


def test_rows_of_one_token_come_first_and_adapters_lie_side_by_side_in_each_group() -> None:
    harness = Harness(a_config(max_num_seqs=8, max_batched_tokens=32))
    harness.add(*(a_request(f"d{i}", adapter=adapter) for i, adapter in enumerate(["y", None, "x", "y"])))
    harness.step()
    harness.add(a_request("p0", range(9), adapter="y"), a_request("p1"), a_request("p2", (5,), adapter="x"))
    plan = harness.step()
    assert plan is not None
    assert [(row.request.request_id, row.request.adapter) for row in plan.rows] == [
        ("d1", None),
        ("d2", "x"),
        ("p2", "x"),
        ("d0", "y"),
        ("d3", "y"),
        ("p1", None),
        ("p0", "y"),
    ]


# --- rows ---


def test_no_more_requests_run_than_there_are_rows_and_a_row_is_used_again() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    harness.add(a_request("a", max_tokens=1), a_request("b", max_tokens=1))
    first, second = harness.step(), harness.step()
    assert first is not None
    assert second is not None
    assert [row.request.request_id for row in (*first.rows, *second.rows)] == ["a", "b"]
    assert second.released_rows == (first.rows[0].row,) == (second.rows[0].row,)


def test_a_released_row_is_told_once_even_over_idle_plans() -> None:
    harness = Harness()
    harness.add(a_request("a", max_tokens=1))
    harness.step()
    assert harness.step() is None
    harness.add(a_request("b", max_tokens=2))
    plans = [harness.step(), harness.step()]
    assert [plan.released_rows for plan in plans if plan is not None] == [(0,), ()]


# --- the prefix cache ---


def test_equal_prefixes_are_computed_once_and_the_first_emission_says_how_much_was_cached() -> None:
    harness = Harness()
    harness.add(a_request("a", range(1, 11), max_tokens=1))
    harness.finish()
    harness.add(a_request("b", (*range(1, 9), 15, 16), max_tokens=2))
    assert shape(harness) == [("b", 8, 10)]
    harness.finish()
    assert harness.emissions["a"][0].num_cached_tokens == 0
    assert [emission.num_cached_tokens for emission in harness.emissions["b"]] == [8, 8]
    assert (harness.scheduler.counters.prefix_queries, harness.scheduler.counters.prefix_hits) == (20, 8)


def test_the_last_token_of_a_prompt_that_is_cached_whole_is_computed_all_the_same() -> None:
    harness = Harness()
    request = a_request("a", range(1, 9))
    harness.add(request)
    harness.finish()
    again = dataclasses.replace(request, request_id=RequestId("b"))
    harness.add(again)
    assert shape(harness) == [("b", 4, 8)]
    harness.finish()
    assert harness.tokens("b") == harness.tokens("a")


def test_generated_tokens_are_found_again_by_the_next_turn() -> None:
    harness = Harness()
    first = a_request("a", range(1, 7), max_tokens=8)
    harness.add(first)
    harness.finish()
    harness.add(a_request("b", (*first.prompt_ids, *harness.tokens("a"), 9)))
    assert shape(harness)[0][1] == 12, "the last token of an answer is never computed"


@pytest.mark.parametrize(
    ("one", "other"),
    [({"salt": "x"}, {"salt": "y"}), ({"adapter": "x"}, {}), ({"adapter": "x"}, {"salt": "x"})],
)
def test_another_salt_or_adapter_shares_nothing(one: dict[str, str], other: dict[str, str]) -> None:
    harness = Harness()
    harness.add(a_request("a", range(1, 11), **one))
    harness.finish()
    harness.add(a_request("b", range(1, 11), **other))
    harness.finish()
    assert harness.emissions["b"][0].num_cached_tokens == 0


@pytest.mark.parametrize(("retention_s", "num_cached"), [(0.0, 0), (60.0, 8), (1.0, 0)])
def test_a_prefix_that_is_wished_for_outlives_others(retention_s: float, num_cached: int) -> None:
    now_s = [5.0]
    harness = Harness(a_config(num_blocks=8), clock=lambda: now_s[0])
    harness.add(a_request("a", range(1, 11), retention_s=retention_s))
    harness.finish()
    now_s[0] += 2.0
    for number in range(6):
        harness.add(a_request(str(number), range(1, 11), salt=str(number)))
        harness.finish()
    harness.add(a_request("b", range(1, 11)))
    harness.finish()
    assert harness.emissions["b"][0].num_cached_tokens == num_cached
    harness.check_all_returned()


def test_nothing_is_shared_where_the_prefix_cache_is_off() -> None:
    harness = Harness(a_config(enable_prefix_cache=False))
    harness.add(a_request("a", range(1, 11)))
    harness.finish()
    harness.add(a_request("b", range(1, 11)))
    assert shape(harness) == [("b", 0, 10)]


def test_blocks_of_running_requests_are_shared_while_they_run() -> None:
    harness = Harness()
    harness.add(a_request("a", range(1, 10), max_tokens=10))
    harness.step()
    usage = harness.scheduler.kv_usage
    harness.add(a_request("b", range(1, 10), max_tokens=10))
    assert shape(harness) == [("a", 9, 10), ("b", 8, 9)]
    assert harness.scheduler.kv_usage == usage + 1 / 64
    harness.finish()
    assert harness.tokens("a") == harness.tokens("b")


# --- too small a cache ---


def test_the_worst_placed_request_is_pre_empted_and_its_answer_is_the_same() -> None:
    harness = Harness(a_config(num_blocks=6, max_model_len=24))
    requests = [a_request("a", range(1, 8), max_tokens=12), a_request("b", range(8, 13), max_tokens=12, priority=-1)]
    harness.add(*requests)
    harness.finish()
    assert harness.scheduler.counters.num_preemptions > 0
    starts = [row.is_admission for plan in harness.runner.plans for row in plan.rows if row.request is requests[1]]
    assert sum(starts) == 1, "the better placed request was never pre-empted"
    assert_right(harness, *requests)


def test_a_pre_empted_request_keeps_its_output_and_its_cached_tokens_of_old() -> None:
    harness = Harness(a_config(num_blocks=6, max_model_len=24))
    harness.add(a_request("a", range(1, 8), max_tokens=12), a_request("b", range(8, 13), max_tokens=12))
    harness.finish()
    again = [
        row for plan in harness.runner.plans for row in plan.rows if row.request.request_id == "b" and row.is_admission
    ]
    assert len(again) >= 2
    assert again[1].end > len(again[1].request.prompt_ids), "its output is computed again as known tokens"
    assert {emission.num_cached_tokens for emission in harness.emissions["b"]} == {0}


def test_nobody_is_admitted_in_a_step_that_pre_empted() -> None:
    harness = Harness(a_config(num_blocks=6, max_model_len=24))
    harness.add(a_request("a", range(1, 8), max_tokens=12), a_request("b", range(8, 13), max_tokens=12))
    before = 0
    while not harness.scheduler.counters.num_preemptions:
        before = harness.scheduler.num_running
        plan = harness.step()
    assert before == 2
    harness.add(a_request("c", (1,), max_tokens=1))
    assert plan is not None
    assert not any(row.is_admission for row in plan.rows)


def test_nobody_is_pre_empted_under_a_step() -> None:
    """What it writes would lie in blocks that are free by then, and its token belong to who has no row."""
    harness = Harness(a_config(num_blocks=6, max_model_len=24), steps_ahead=1)
    requests = [a_request("a", range(1, 8), max_tokens=12), a_request("b", range(8, 13), max_tokens=12)]
    harness.add(*requests)
    is_under_way = False
    while not harness.scheduler.counters.num_preemptions:
        is_under_way = bool(harness.under_way)
        harness.step()
    assert not is_under_way
    harness.finish()
    assert_right(harness, *requests)


def test_a_large_request_is_not_overtaken_for_ever_by_small_ones() -> None:
    harness = Harness(a_config(num_blocks=6, max_model_len=24))
    harness.add(a_request("s0", (1,), max_tokens=8))
    harness.step()
    harness.add(a_request("large", range(1, 21), max_tokens=3))
    for i in range(1, 40):
        harness.add(a_request(f"s{i}", (i % 20,), max_tokens=8))
        harness.step()
        if harness.tokens("large"):
            break
    assert i < 12
    harness.finish()


def test_a_request_that_needs_the_whole_cache_runs_alone() -> None:
    harness = Harness(a_config(num_blocks=4, max_model_len=16))
    requests = [a_request(name, range(i, i + 10 + i), max_tokens=6 - i) for i, name in enumerate("abcd")]
    harness.add(*requests)
    harness.finish()
    assert_right(harness, *requests)


# --- ends ---


def test_an_end_of_sequence_ends_the_answer_and_is_its_last_token() -> None:
    requests = [a_request(f"r{i}", (i % 24, i // 24), max_tokens=40, ignore_eos=False) for i in range(40)]
    harness = Harness()
    harness.add(*requests)
    harness.finish()
    stopped = [request for request in requests if harness.reason(request.request_id) is FinishReason.STOP]
    assert stopped
    assert all(harness.tokens(request.request_id)[-1] in EOS_IDS for request in stopped)
    assert_right(harness, *requests)


def test_a_stop_token_ends_the_answer_even_where_the_end_of_sequence_is_ignored() -> None:
    request = a_request("a", max_tokens=20)
    request = a_request("a", max_tokens=20, stop_token_ids=(sampled_id(request),))
    harness = Harness()
    harness.add(request)
    harness.finish()
    assert (len(harness.tokens("a")), harness.reason("a")) == (2, FinishReason.STOP)


def test_no_stop_token_ends_the_answer_before_min_tokens() -> None:
    stop = (sampled_id(a_request("a")),)
    harness = Harness()
    harness.add(a_request("a", max_tokens=3, min_tokens=3, stop_token_ids=stop))
    harness.finish()
    assert (len(harness.tokens("a")), harness.reason("a")) == (3, FinishReason.LENGTH)


def test_the_context_length_ends_the_answer() -> None:
    harness = Harness(a_config(max_model_len=10))
    harness.add(a_request("a", range(1, 8), max_tokens=1000))
    harness.finish()
    assert (len(harness.tokens("a")), harness.reason("a")) == (3, FinishReason.LENGTH)


def test_a_cancelled_request_returns_everything_wherever_it_is() -> None:
    harness = Harness(a_config(max_num_seqs=2, max_batched_tokens=7))
    names = ["decodes", "prefills", "waits"]
    harness.add(a_request("decodes"), a_request("prefills", range(20), adapter="x"), a_request("waits", adapter="y"))
    harness.step()
    for name in names:
        harness.cancel(name)
    harness.step()
    assert {harness.reason(name) for name in names} == {FinishReason.CANCELLED}
    harness.check_all_returned()


def test_a_step_under_way_gives_nothing_to_who_has_the_id_of_one_that_it_computes() -> None:
    harness = Harness(steps_ahead=1)
    harness.add(a_request("a", range(1, 6)))
    harness.step()
    harness.cancel("a")
    assert [emission.finish_reason for emission in harness.scheduler.drain()] == [FinishReason.CANCELLED]
    harness.add(other := a_request("a", range(6, 9)))
    harness.finish()
    assert harness.reason("a") is FinishReason.LENGTH
    assert harness.tokens("a") == answer_alone(other, harness.config.max_model_len).token_ids


def test_a_token_that_is_not_drawn_yet_is_none_of_the_answer() -> None:
    harness = Harness(steps_ahead=1)
    harness.add(a_request("a", max_tokens=9))
    harness.step()
    harness.step()
    harness.cancel("a")
    assert harness.scheduler.counters.trace_by_id[RequestId("a")].num_output_tokens == 1
    assert len(harness.tokens("a")) == 1


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(5, 64), (60, 8)])
def test_the_last_token_is_never_computed_though_it_is_not_known_as_the_next_step_is_planned(
    max_tokens: int, max_model_len: int
) -> None:
    harness = Harness(a_config(max_model_len=max_model_len), steps_ahead=1)
    harness.add(a_request("a", max_tokens=max_tokens))
    harness.finish()
    assert [row.end for plan in harness.runner.plans for row in plan.rows] == [3, 4, 5, 6, 7]
    assert len(harness.tokens("a")) == 5


def test_cancelling_what_is_not_alive_does_nothing() -> None:
    harness = Harness()
    harness.add(a_request("a", max_tokens=1))
    harness.step()
    harness.cancel("a")
    harness.cancel("never seen")
    assert len(harness.emissions["a"]) == 1
    assert harness.step() is None


def test_a_passed_deadline_ends_waiting_and_running_requests_with_a_sentence() -> None:
    now = [0.0]
    harness = Harness(a_config(max_num_seqs=1), clock=lambda: now[0])
    harness.add(a_request("runs", max_tokens=30, deadline_s=5.0), a_request("waits", deadline_s=5.0), a_request("free"))
    harness.step()
    now[0] = 5.0
    harness.step()
    for name in ("runs", "waits"):
        assert harness.reason(name) is FinishReason.EXPIRED
        assert harness.emissions[name][-1].error == DEADLINE_PASSED
    harness.finish()
    assert_right(harness, a_request("free"))


def test_a_row_that_fails_ends_its_request_alone_and_leaves_nothing_to_share() -> None:
    harness = Harness(failing=frozenset({"bad"}))
    good = a_request("good", range(1, 10))
    harness.add(a_request("bad", range(5, 14)), good)
    harness.step()
    [emission] = harness.emissions["bad"]
    assert (emission.finish_reason, emission.token_ids) == (FinishReason.FAILED, ())
    assert emission.error
    harness.add(a_request("next", range(5, 14)))
    harness.finish()
    assert harness.emissions["next"][0].num_cached_tokens == 0
    assert_right(harness, good, a_request("next", range(5, 14)))


@pytest.mark.parametrize("num_snapshots", [0, 8])
def test_what_a_row_that_fails_has_computed_in_earlier_steps_is_not_shared_either(num_snapshots: int) -> None:
    """Rows that draw nothing are not looked at, so whoever began alike shared what may have failed, and failed, too."""
    harness = Harness(a_config(max_batched_tokens=4, num_snapshots=num_snapshots), failing=frozenset({"bad"}))
    harness.add(a_request("bad", range(5, 18)))
    harness.finish()
    assert harness.emissions["bad"][-1].finish_reason is FinishReason.FAILED
    following = a_request("next", range(5, 18))
    harness.add(following)
    harness.finish()
    assert harness.emissions["next"][0].num_cached_tokens == 0
    assert_right(harness, following)


def test_a_resumed_request_goes_on_where_it_was() -> None:
    whole = a_request("a", range(1, 8), max_tokens=10)
    tokens = answer_alone(whole, 64).token_ids
    harness = Harness()
    harness.add(dataclasses.replace(whole, prior_output_ids=tokens[:6]))
    plan = harness.step()
    assert plan is not None
    assert list(plan.rows[0].output_ids[:6]) == list(tokens[:6])
    assert plan.rows[0].is_admission
    harness.finish()
    assert harness.tokens("a") == tokens[6:]


def test_failing_all_returns_everything() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    harness.add(a_request("a", adapter="x"), a_request("b"))
    harness.step()
    harness.scheduler.fail_all("The device is gone.")
    assert {(e.request_id, e.error) for e in harness.scheduler.drain()} == {
        ("a", "The device is gone."),
        ("b", "The device is gone."),
    }
    harness.check_all_returned()


# --- what is refused ---


@pytest.mark.parametrize(
    ("request_", "field", "code", "words"),
    [
        (a_request("a", ()), "prompt", None, ["empty", "1"]),
        (a_request("a", (1,) * 64), "messages", "context_length_exceeded", ["64 tokens", "prompt has 64"]),
        (a_request("a", (1,) * 900), "messages", "context_length_exceeded", ["64", "900"]),
        (a_request("a", max_tokens=0), "max_tokens", None, ["0", "1"]),
        (a_request("a", prior_output_ids=(1, 2), max_tokens=2), "max_tokens", None, ["2", "3"]),
        (a_request("a", (1, 24)), "prompt", None, ["24", "0 to 23"]),
        (a_request("a", (-1, 2)), "prompt", None, ["-1", "0 to 23"]),
        (a_request("a", prior_output_ids=(99,)), "prompt", None, ["99", "0 to 23"]),
    ],
)
def test_a_request_that_can_never_be_served_is_refused_with_field_and_bound(
    request_: Request, field: str, code: str | None, words: list[str]
) -> None:
    harness = Harness()
    with pytest.raises(RequestError) as refusal:
        harness.add(request_)
    assert (refusal.value.field, refusal.value.code) == (field, code)
    assert all(word in refusal.value.message for word in words)
    harness.check_all_returned()


def test_who_wants_a_vector_needs_no_room_and_no_model_for_an_answer() -> None:
    config = a_config(generates=False, max_model_len=8)
    check_request(a_request("fills it", range(8), pooling=Pooling.LAST, max_tokens=0), config)
    with pytest.raises(RequestError, match="8 tokens, but the input has 9") as too_long:
        check_request(a_request("too long", range(9), pooling=Pooling.LAST), config)
    with pytest.raises(RequestError, match="embedding model") as generates:
        check_request(a_request("answers"), config)
    with pytest.raises(RequestError, match="no classifier") as refused:
        check_request(a_request("scored", pooling=Pooling.CLASS, max_tokens=0), config)
    assert refused.value.field == "model"
    assert (too_long.value.field, generates.value.field) == ("input", "model")


def test_a_request_that_the_cache_can_never_hold_is_refused_with_both_numbers() -> None:
    harness = Harness(a_config(num_blocks=4))
    with pytest.raises(RequestError, match=r"20 tokens.* holds 16") as refusal:
        harness.add(a_request("a", range(1, 11), max_tokens=10))
    assert refusal.value.code == "context_length_exceeded"
    harness.add(a_request("b", range(1, 11), max_tokens=6))
    harness.finish()


def test_an_unknown_vocabulary_still_refuses_what_no_vocabulary_has() -> None:
    harness = Harness(a_config(vocab_size=None))
    with pytest.raises(RequestError, match="outside the vocabulary"):
        harness.add(a_request("a", (1 << 31,)))


@pytest.mark.parametrize("scores", [None, 0])
def test_a_long_prompt_with_scores_keeps_nobody_out(scores: int | None) -> None:
    """It took every row of logits in every step that it was read in."""
    harness = Harness(a_config(max_num_seqs=4, max_batched_tokens=64, max_model_len=512, num_blocks=600))
    prompt = [1 + i % 20 for i in range(200)]
    harness.add(a_request("long", prompt, tenant="a", max_tokens=2, num_prompt_logprobs=scores))
    harness.step()
    harness.add(a_request("short", (1, 2, 3), tenant="b", max_tokens=2))
    for _ in range(5):
        harness.step()
    assert harness.tokens("short")


def test_only_who_answers_tells_how_long_the_answers_of_its_flow_are() -> None:
    harness = Harness(a_config(max_num_seqs=1))
    queue, flow = harness.scheduler._fair_queue, ("", None)
    before = queue.mean_output(flow)
    harness.add(a_request("answers", max_tokens=4))
    harness.step()
    harness.add(a_request("vector", pooling=Pooling.LAST), a_request("cancelled"))
    harness.cancel("cancelled")
    harness.finish()
    assert queue.mean_output(flow) == before + NEW_SHARE * (4 - before)


def test_answers_that_are_given_up_do_not_tell_how_long_others_are() -> None:
    """Ten that missed their deadlines early made the wait behind the next ones seem an eighth of what it was."""
    harness = Harness(a_config(max_num_seqs=1))
    queue, flow = harness.scheduler._fair_queue, ("", None)
    before = queue.mean_output(flow)
    harness.add(a_request("late", max_tokens=40))
    harness.step()
    harness.scheduler.fail_all("given up")
    assert queue.mean_output(flow) == before
    harness.add(a_request("stopped", max_tokens=40))
    harness.step()
    harness.cancel("stopped")
    assert queue.mean_output(flow) != before


def test_who_is_cancelled_before_its_turn_costs_its_flow_nothing() -> None:
    def turn_after(num_cancelled: int) -> int:
        harness = Harness(a_config(max_num_seqs=2, num_blocks=400, max_model_len=64))
        harness.add(a_request("long", tenant="a", max_tokens=60, priority=-10))
        harness.step()
        for index in range(num_cancelled):
            harness.add(a_request(f"c{index}", range(1, 17), tenant="a", max_tokens=8))
            harness.cancel(f"c{index}")
        harness.add(a_request("next", range(1, 17), tenant="a", max_tokens=8))
        harness.add(*(a_request(f"b{i}", range(1, 17), tenant="b", max_tokens=2) for i in range(25)))
        harness.finish()
        admitted = [row.request.request_id for plan in harness.runner.plans for row in plan.rows if row.is_admission]
        return admitted.index("next")

    assert turn_after(20) == turn_after(0)
