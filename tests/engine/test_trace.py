"""What is told of a request that has ended is what happened to it, whoever it shared its steps with."""

from __future__ import annotations

from itertools import pairwise

import pytest

from engine.trace import MAX_CHUNKS, MAX_PREEMPTIONS, Preemption, PrefillChunk, RequestTrace, TraceNotes
from tests.engine.scripted import Harness, a_config, a_request


class Ticking:
    """A clock by which every reading takes a millisecond."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def traces_of(harness: Harness) -> dict[str, RequestTrace]:
    return dict(harness.scheduler.counters.trace_by_id)


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_stages_follow_each_other_and_add_up(steps_ahead: int) -> None:
    clock = Ticking()
    harness = Harness(a_config(max_batched_tokens=8), clock=clock, steps_ahead=steps_ahead)
    harness.add(a_request("long", range(1, 21), max_tokens=5), a_request("short", max_tokens=9))
    harness.finish()
    traces = traces_of(harness)
    assert sum(chunk.num_tokens for chunk in traces["long"].chunks) == 20
    for trace in traces.values():
        assert trace.admitted_s is not None
        assert trace.first_token_s is not None
        assert 0 < trace.admitted_s <= trace.first_token_s < trace.end_s
        assert all(a.end_s <= b.start_s + 1e-9 for a, b in pairwise(trace.chunks))
        assert trace.chunks[-1].end_s == pytest.approx(trace.first_token_s)
        assert (trace.queue_s, trace.reason) == (trace.admitted_s, "length")
        assert trace.prefill_s is not None
        assert trace.decode_s is not None
        assert trace.prefill_s + trace.decode_s + trace.admitted_s == pytest.approx(trace.end_s)
    # The device was never given to anyone else, and never to two at once.
    assert 0 < sum(trace.device_s for trace in traces.values()) <= clock.now_s


def test_device_time_is_shared_by_tokens() -> None:
    harness = Harness(clock=Ticking())
    harness.add(*(a_request(name, (1, 2, 3), max_tokens=6) for name in "ab"))
    harness.finish()
    a, b = traces_of(harness).values()
    assert a.device_s == pytest.approx(b.device_s)
    assert a.device_s + b.device_s <= a.end_s + 0.01


def test_what_is_forced_on_a_request_is_in_its_share() -> None:
    harness = Harness(clock=Ticking())
    harness.add(a_request("a", max_tokens=12, grammar="h", ignore_eos=False, seed=2))
    harness.finish()
    (trace,) = traces_of(harness).values()
    assert trace.num_output_tokens == 12
    # It was alone in every step, each of which took a millisecond.
    assert trace.device_s == pytest.approx(0.001 * len(harness.emissions["a"])) == pytest.approx(0.006)


def test_a_request_that_was_put_back_says_so() -> None:
    harness = Harness(a_config(num_blocks=16, max_num_seqs=4), clock=Ticking())
    harness.add(*(a_request(name, range(i, i + 14), max_tokens=20) for i, name in enumerate("abcd")))
    harness.finish()
    traces = traces_of(harness)
    assert sum(trace.num_preemptions for trace in traces.values()) == harness.scheduler.counters.num_preemptions > 0
    for trace in traces.values():
        assert trace.num_output_tokens == 20
        assert len(trace.preemptions) == trace.num_preemptions
        spans = [(trace.admitted_s, trace.admitted_s), *trace.preemptions, (trace.end_s, trace.end_s)]
        assert all(a[1] <= b[0] < b[1] or b[0] == b[1] for a, b in pairwise(spans))
        # What was recomputed comes after it was admitted again.
        assert all(not p.start_s < c.start_s < p.end_s for p in trace.preemptions for c in trace.chunks)


def test_one_that_ends_while_it_is_put_back_waited_to_its_end() -> None:
    harness = Harness(a_config(num_blocks=16, max_num_seqs=4), clock=Ticking())
    harness.add(*(a_request(name, range(i, i + 14), max_tokens=20) for i, name in enumerate("abcd")))
    while not harness.scheduler.counters.num_preemptions:
        harness.step()
    for name in "abcd":
        harness.cancel(name)
    [waiting] = [trace for trace in traces_of(harness).values() if trace.preemptions]
    assert waiting.preemptions[-1].end_s == waiting.end_s > waiting.preemptions[-1].start_s


def test_one_that_never_ran_has_no_stages() -> None:
    harness = Harness(a_config(max_num_seqs=1), clock=Ticking())
    harness.add(a_request("a"), a_request("b"))
    harness.step()
    harness.cancel("b")
    trace = traces_of(harness)["b"]
    assert (trace.queue_s, trace.prefill_s, trace.decode_s, trace.device_s) == (None, None, None, 0.0)


def test_what_is_kept_is_bounded() -> None:
    notes = TraceNotes()
    for number in range(MAX_CHUNKS + 10):
        notes.note_chunk(PrefillChunk(number, number + 0.5, 2))
    assert len(notes.chunks) == MAX_CHUNKS
    assert notes.chunks[-1] == PrefillChunk(MAX_CHUNKS - 1, MAX_CHUNKS + 9.5, 22)
    for number in range(MAX_PREEMPTIONS + 10):
        notes.begin_preemption(number)
        notes.end_preemption(number + 0.5, 0.0)
    assert len(notes.preemptions) == MAX_PREEMPTIONS
    assert notes.preemptions[-1] == Preemption(MAX_PREEMPTIONS - 1, MAX_PREEMPTIONS + 9.5)
