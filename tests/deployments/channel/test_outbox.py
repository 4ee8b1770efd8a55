"""What waits for a gateway leaves in order, once, and when it is due."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.outbox import MAX_SPACING_S, Outbox
from deployments.channel.token_frames import payload_bytes
from engine.request import Emission, FinishReason, RequestId

SPACING_S = 0.001


def tokens(request_id: str, *token_ids: int, finish: FinishReason | None = None) -> Emission:
    return Emission(request_id=RequestId(request_id), token_ids=token_ids, finish_reason=finish)


def test_a_frame_waits_for_each_stream_of_the_last_one() -> None:
    outbox = Outbox(SPACING_S)
    outbox.put([tokens("a", 1), tokens("b", 2), tokens("c", 3)])
    assert outbox.due_s() is not None
    assert len(outbox.take(10.0)) == 3
    outbox.put([tokens("a", 4)])
    assert outbox.due_s() == pytest.approx(10.003)
    assert outbox.take(10.002) == []
    assert outbox.take(10.003) == [tokens("a", 4)]
    outbox.put([tokens("a", 5)])
    assert outbox.due_s() == pytest.approx(10.004)


def test_first_tokens_and_the_end_of_an_answer_wait_for_nothing_and_the_others_go_on_waiting() -> None:
    outbox = Outbox(SPACING_S)
    outbox.put([tokens(str(i), i) for i in range(40)])
    outbox.take(10.0)
    outbox.put([tokens("1", 7), tokens("2", 8)])
    outbox.put(
        [tokens("1", 9, finish=FinishReason.LENGTH), tokens("new", 10)], begun={RequestId("new"), RequestId("x")}
    )
    assert outbox.due_s() == 0.0
    end = tokens("1", 9, finish=FinishReason.LENGTH)
    assert outbox.take(10.001) == [tokens("1", 7), end, tokens("new", 10)]
    assert outbox.due_s() == pytest.approx(10.04)
    assert outbox.take(10.05) == [tokens("2", 8)]


def test_however_many_streams_there_are_the_next_frame_comes_within_the_bound() -> None:
    outbox = Outbox(SPACING_S)
    outbox.put([tokens(str(i), i) for i in range(1000)])
    outbox.take(10.0)
    outbox.put([tokens("1", 1)])
    assert outbox.due_s() == pytest.approx(10.0 + MAX_SPACING_S)


def test_without_spacing_each_step_leaves_at_once() -> None:
    outbox = Outbox(0.0)
    for step in range(3):
        outbox.put([tokens("a", step), tokens("b", step)])
        assert len(outbox.take(10.0)) == 2


STEPS = st.lists(
    st.tuples(
        st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.booleans()), max_size=6),
        st.floats(0, 0.01),
        st.booleans(),
    ),
    max_size=40,
)


@given(STEPS)
def test_everything_leaves_once_and_in_order_and_nothing_urgent_is_left(
    steps: list[tuple[list[tuple[int, bool, bool]], float, bool]],
) -> None:
    outbox, now_s, count = Outbox(SPACING_S), 0.0, 0
    put: dict[str, list[int]] = {}
    left: dict[str, list[int]] = {}

    def leave(taken: list[Emission]) -> None:
        for emission in taken:
            left.setdefault(emission.request_id, []).extend(emission.token_ids)

    for emissions, gap_s, is_read in steps:
        step, urgent = [], set()
        for request, is_first, is_last in emissions:
            count += 1
            finish = FinishReason.STOP if is_last else None
            step.append(tokens(f"r{request}", count, finish=finish))
            put.setdefault(f"r{request}", []).append(count)
            if is_first:
                urgent.add(RequestId(f"r{request}"))
        outbox.put(step, urgent)
        now_s += gap_s
        if is_read:
            due_s = outbox.due_s()
            taken = outbox.take(now_s)
            leave(taken)
            assert bool(taken) == (due_s is not None and due_s <= now_s)
            must = urgent | {e.request_id for e in step if e.finish_reason is not None}
            assert all(put[name] == left[name] for name in must if name in put)
            assert outbox.due_s() is None or now_s < outbox.due_s() <= now_s + MAX_SPACING_S
    waiting = outbox.num_bytes
    rest = outbox.take_all()
    assert sum(map(payload_bytes, rest)) == waiting
    assert outbox.num_bytes == 0
    leave(rest)
    assert left == put
