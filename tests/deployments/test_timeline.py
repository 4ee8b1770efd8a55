from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from deployments.timeline import (
    MAX_ANSWERS,
    MAX_ARRIVALS,
    MAX_ATTEMPTS,
    MAX_KEPT,
    MAX_TIMELINES,
    Reception,
    Recorder,
    Stage,
    Timeline,
    TimelineStore,
    ask_traces,
    with_engine_stages,
)
from engine.request import RequestId
from engine.trace import Preemption, PrefillChunk, RequestTrace

TRACE = RequestTrace(
    queued_unix_s=1000.5,
    admitted_s=0.1,
    first_token_s=0.4,
    end_s=2.0,
    chunks=(PrefillChunk(0.1, 0.2, 512), PrefillChunk(0.2, 0.4, 88)),
    num_prompt_tokens=600,
    num_cached_tokens=0,
    num_output_tokens=9,
    preemptions=(Preemption(0.5, 0.75),),
    num_preemptions=1,
    device_s=0.5,
    reason="length",
)


def a_timeline(name: str = "req.1") -> Timeline:
    return Timeline(request_id=name, model="m", base="m", arrived_unix_s=1000.0)


def test_stages_are_noted_however_they_end() -> None:
    now_s = [5.0]
    recorder = Recorder(a_timeline(), reception=Reception(lambda: now_s[0]))
    with recorder.stage("tokenize"):
        now_s[0] = 5.5
    now_s[0] = 6.0
    with pytest.raises(ZeroDivisionError), recorder.stage("safety"):
        1 / (now_s[0] - 6.0)
    assert recorder.timeline.stages == [Stage("tokenize", 0.0, 0.5), Stage("safety", 1.0, 1.0)]


def test_answers_share_what_came_before_them_once_and_their_times_begin_there() -> None:
    now_s = [5.0]
    reception = Reception(lambda: now_s[0])
    for _ in range(2):
        with reception.stage("limits"):
            now_s[0] += 1.0
    for name in ("req.1", "req.2"):
        recorder = Recorder(a_timeline(name), reception=reception)
        assert recorder.now_s == 2.0
        with recorder.stage("tokenize"):
            pass
        assert recorder.timeline.stages == [Stage("limits", 0.0, 1.0), Stage("tokenize", 2.0, 2.0)]


def test_tokens_and_the_end_are_noted_once() -> None:
    now_s = [0.0]
    recorder = Recorder(a_timeline(), reception=Reception(lambda: now_s[0]))
    for at_s, count in ((1.0, 1), (2.0, 3), (4.0, 1)):
        now_s[0] = at_s
        recorder.note_tokens(count, 16)
    now_s[0] = 5.0
    recorder.end("stop")
    recorder.end("cancelled")
    timeline = recorder.timeline
    assert [*timeline.arrivals] == [(1.0, 1), (2.0, 3), (4.0, 1)]
    assert (timeline.first_token_s, timeline.end_s, timeline.outcome) == (1.0, 5.0, "stop")
    assert (timeline.num_tokens, timeline.num_cached_tokens, timeline.tpot_s) == (5, 16, 1.0)
    assert timeline.client_id == "req"
    for number in range(MAX_ARRIVALS + 5):
        recorder.note_tokens(1, 16)
        recorder.note_attempt(RequestId(f"a{number}"))
    assert len(timeline.arrivals) == MAX_ARRIVALS
    assert len(timeline.called_s_by_attempt) == MAX_ATTEMPTS


def test_what_engines_tell_is_put_in_its_place() -> None:
    timeline = a_timeline()
    timeline.stages.append(Stage("tokenize", 0.0, 0.3))
    timeline.called_s_by_attempt |= {RequestId("lost"): 0.3, RequestId("a"): 0.4}
    stages = with_engine_stages(timeline, {RequestId("a"): TRACE})
    assert [stage.name for stage in stages] == [
        "tokenize", "route", "queue", "prefill of 512 tokens", "prefill of 88 tokens", "decode", "preempted",
    ]  # fmt: skip
    assert stages[1:3] == [Stage("route", 0.4, 0.5), Stage("queue", 0.5, pytest.approx(0.6))]
    assert stages[-2:] == [Stage("decode", pytest.approx(0.9), pytest.approx(2.5)), Stage("preempted", 1.0, 1.25)]


def test_a_trace_of_the_release_before_is_read() -> None:
    """While one replaces the other; its last field was not there."""
    *before, _ = TRACE.__getstate__()  # type: ignore[misc]
    old = object.__new__(RequestTrace)
    old.__setstate__(before)  # type: ignore[attr-defined]
    timeline = a_timeline()
    timeline.called_s_by_attempt[RequestId("a")] = 0.4
    stages = with_engine_stages(timeline, {RequestId("a"): old})
    assert [stage.name for stage in stages][-1] == "decode"
    assert (old.device_s, old.reason) == (TRACE.device_s, "length")


@pytest.mark.parametrize(("step_s", "queued_s"), [(0.0, 0.5), (3600.0, 1.0), (-3600.0, 0.25)])
def test_a_clock_that_is_set_moves_no_stage_out_of_its_answer(step_s: float, queued_s: float) -> None:
    """Set forward by an hour, the engine's part of a timeline came an hour after the answer's end."""
    timeline = a_timeline()
    timeline.called_s_by_attempt[RequestId("a")] = 0.25
    timeline.end_s = 3.0
    trace = replace(TRACE, queued_unix_s=TRACE.queued_unix_s + step_s)
    stages = with_engine_stages(timeline, {RequestId("a"): trace})
    assert stages[0] == Stage("route", 0.25, queued_s)
    assert max(stage.end_s for stage in stages) == pytest.approx(queued_s + TRACE.end_s)


def test_a_store_keeps_the_last_requests_and_all_their_answers() -> None:
    store = TimelineStore()
    first = [a_timeline("r0.a"), a_timeline("r0.b")]
    for timeline in first:
        store.add(timeline)
    assert store.find("r0") == first
    for number in range(1, MAX_KEPT + 1):
        store.add(a_timeline(f"r{number}.a"))
    assert store.find("r0") == []
    assert len(store.find(f"r{MAX_KEPT}")) == 1


def test_of_requests_that_all_have_one_id_the_last_answers_are_kept() -> None:
    """The id is the client's: one that repeats it for ever must not fill the gateway's memory."""
    store = TimelineStore()
    store.add(a_timeline("other.1"))
    for i in range(MAX_ANSWERS + 5):
        store.add(a_timeline(f"same.{i}"))
    assert [timeline.request_id for timeline in store.find("same")] == [f"same.{i}" for i in range(5, MAX_ANSWERS + 5)]
    for i in range(MAX_ANSWERS + 5):
        refused = a_timeline(f"same.r{i}")
        store.add(refused)
        store.set_apart(refused)
    assert len(store.find("same")) < 2 * MAX_ANSWERS + 1
    assert len(store.find("other")) == 1


def test_all_ids_together_have_a_bound_and_the_first_to_go_are_of_the_id_used_longest_ago() -> None:
    """256 ids of 1,024 long answers each, as a client that names its sessions may have, took 26 GB."""
    store = TimelineStore()
    for number in range(MAX_TIMELINES + 3):
        store.add(a_timeline(f"r{number % 8}.{number}"))
    kept = [timeline.request_id for client in range(8) for timeline in store.find(f"r{client}")]
    assert len(kept) == MAX_TIMELINES
    assert {f"r{number}.{number}" for number in (1, 2, 3)}.isdisjoint(kept)
    for number in range(MAX_KEPT):
        store.add(a_timeline(f"new{number}.1"))
    assert not store.find("r7")
    assert store.find("new0")


def test_an_id_that_is_used_again_is_as_new_as_its_last_request() -> None:
    store = TimelineStore()
    for name in ("again.1", *(f"req{i}.1" for i in range(MAX_KEPT - 1)), "again.2", "new.1"):
        store.add(a_timeline(name))
    assert len(store.find("again")) == 2
    assert store.find("req0") == []


def test_refused_requests_push_out_no_others_but_older_refused_ones() -> None:
    store = TimelineStore()
    good, refused = a_timeline("r.a"), [a_timeline(f"x{number}.a") for number in range(MAX_KEPT + 1)]
    also_refused = a_timeline("r.b")
    store.add(good)
    for timeline in (also_refused, *refused):
        store.add(timeline)
        store.set_apart(timeline)
    assert store.find("r") == [good]
    assert store.find("x0") == []
    assert store.find("x1") == [refused[1]]
    store.add(also_refused)
    store.set_apart(also_refused)
    assert store.find("r") == [good, also_refused]


async def test_each_model_is_asked_once_and_none_without_attempts() -> None:
    asked: list[tuple[str, list[RequestId]]] = []

    async def source(base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
        asked.append((base, list(attempts)))
        return dict.fromkeys(attempts, TRACE)

    one, two, three = RequestId("1"), RequestId("2"), RequestId("3")
    # A record that a dead gateway left has neither model nor attempts.
    found = await ask_traces([("m", [one]), ("", []), ("n", [two]), ("m", [three])], source)
    assert asked == [("m", [one, three]), ("n", [two])]
    assert found == {one: TRACE, two: TRACE, three: TRACE}
