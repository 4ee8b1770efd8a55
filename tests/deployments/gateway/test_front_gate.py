"""The gateway's own door, on a clock that the test moves."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.gateway import front_gate
from deployments.gateway.front_gate import MAX_QUIET_S, MIN_INSIDE, FrontGate
from deployments.siblings import Siblings
from engine.errors import OverloadError

FLOW = "adapter", "tenant"


class Front:
    """A gate, its clock, and who is inside."""

    def __init__(self, max_wait_s: float = 4.0) -> None:
        self.now_s = 0.0
        self.gate = FrontGate(max_wait_s=max_wait_s, clock=lambda: self.now_s)
        self.inside = ExitStack()

    def serve(self, count: int, each_s: float) -> None:
        """Let so many come, each as the one before has its first text."""
        for _ in range(count):
            with self.gate.passage(FLOW) as passage:
                self.now_s += each_s
                self.gate.end(passage)

    def enter(self, count: int, flow: object = FLOW) -> None:
        """Let so many come and wait."""
        for _ in range(count):
            self.inside.enter_context(self.gate.passage(flow))

    def ask(self, timeout_s: float | None = None, flow: object = FLOW) -> None:
        with self.gate.passage(flow, timeout_s):
            pass


@given(count=st.integers(8, 40), each_s=st.floats(1e-3, 0.05), inside=st.integers(0, 30))
def test_the_wait_is_the_number_inside_times_what_one_takes(count: int, each_s: float, inside: int) -> None:
    front = Front()
    front.serve(count, each_s)
    front.enter(inside)
    assert front.gate.wait_s() == pytest.approx(inside * each_s)


def test_a_crowd_that_comes_at_once_is_let_in_while_nobody_has_waited() -> None:
    front = Front()
    front.serve(50, 0.3)
    front.enter(100)
    front.ask()
    front.now_s += 2.1
    with pytest.raises(OverloadError):
        front.ask()


def test_who_would_be_late_is_refused_and_told_when_not() -> None:
    front = Front()
    front.serve(10, 0.1)
    front.enter(41)
    front.ask()
    # It shows that there is a queue.
    front.now_s += 2.1
    for timeout_s, bound_s in ((None, 4.0), (0.5, 0.5)):
        with pytest.raises(OverloadError) as refused:
            front.ask(timeout_s)
        assert (refused.value.reason, refused.value.retry_after_s) == ("wait", pytest.approx(max(1.0, 4.1 - bound_s)))
    assert front.gate.refused_by_reason == {"wait": 2}
    front.inside.close()
    front.ask(0.001)


def test_a_slow_server_is_not_an_overloaded_one() -> None:
    front = Front()
    front.serve(10, 4.9)
    front.enter(MIN_INSIDE)
    with pytest.raises(OverloadError):
        front.ask()


def test_nothing_is_foretold_from_few_and_old_waits_are_no_sign_of_a_queue() -> None:
    front = Front()
    front.serve(7, 1.0)
    front.enter(1)
    assert front.gate.wait_s() == 0
    front.inside.close()
    front.serve(20, 2.5)
    front.enter(MIN_INSIDE)
    with pytest.raises(OverloadError):
        front.ask()
    front.inside.close()
    front.now_s += MAX_QUIET_S + 1
    front.enter(MIN_INSIDE)
    front.ask()


def test_a_request_is_judged_by_those_who_are_served_before_it() -> None:
    front = Front()
    front.serve(10, 0.1)
    front.enter(41)
    front.now_s += 2.1
    with pytest.raises(OverloadError):
        front.ask()
    with front.gate.passage(FLOW, None, -1):
        pass


def test_a_pause_without_anybody_does_not_count_as_slowness() -> None:
    front = Front()
    for _ in range(20):
        front.serve(1, 0.01)
        front.now_s += 3.0
    front.now_s -= 3.0
    front.enter(1)
    assert front.gate.wait_s() == pytest.approx(0.01)


def test_a_light_flow_is_let_in_beside_one_that_floods_up_to_its_share() -> None:
    front = Front()
    front.serve(10, 0.1)
    front.enter(41)
    front.now_s += 2.1
    front.enter(20, flow="light")
    with pytest.raises(OverloadError):
        front.ask(flow="light")


def test_what_an_engine_refused_is_refused_in_its_stead_for_a_moment_and_to_the_same_flow_only() -> None:
    front = Front()

    def refused_behind(reason: str) -> None:
        with front.gate.passage(FLOW, None, 1):
            raise OverloadError("full", retry_after_s=3.0, reason=reason)

    with pytest.raises(OverloadError):
        refused_behind("deadline")
    front.ask()
    with pytest.raises(OverloadError):
        refused_behind("queue_time")
    front.now_s += 0.5
    with pytest.raises(OverloadError) as held, front.gate.passage(FLOW, None, 1):
        pass
    assert (held.value.reason, held.value.retry_after_s) == ("held", pytest.approx(2.5))
    front.ask()
    front.ask(flow="other")
    front.now_s += 0.6
    with front.gate.passage(FLOW, None, 1):
        pass


def test_a_refusal_stands_no_longer_than_those_who_are_ahead() -> None:
    """A thousand streams were cut, and the idle server refused everybody for seconds."""
    front = Front()
    crowd = [ExitStack() for _ in range(5)]
    for place in crowd:
        front.gate.end(place.enter_context(front.gate.passage(FLOW)))
    with pytest.raises(OverloadError), front.gate.passage(FLOW):
        raise OverloadError("full", retry_after_s=3.0, reason="queue_time")
    for place in crowd[:2]:
        place.close()
    with pytest.raises(OverloadError):
        front.ask()
    crowd[2].close()
    front.ask()


def test_what_serve_refuses_is_counted_here_and_what_an_engine_does_is_counted_there() -> None:
    """Most refusals of a flood were in no count, and no alert told of it."""
    front = Front()
    for reason in ("replicas_full", "deadline", "busy"):
        with pytest.raises(OverloadError), front.gate.passage(FLOW):
            raise OverloadError("Too many.", retry_after_s=1.0, reason=reason)
    assert front.gate.refused_by_reason == {"replicas_full": 1}


def test_the_answers_of_one_request_come_in_with_its_first() -> None:
    front, siblings = Front(), Siblings()
    front.serve(50, 0.3)
    with front.gate.passage(FLOW, siblings=siblings):
        front.enter(100)
        front.now_s += 2.1
        with pytest.raises(OverloadError):
            front.ask()
        with front.gate.passage(FLOW, siblings=siblings):
            pass


def test_a_refusal_for_which_siblings_are_the_reason_holds_nobody_else() -> None:
    front, siblings = Front(), Siblings()
    refusal = OverloadError("full", retry_after_s=1.0, reason="queue_time")
    with front.gate.passage(FLOW, siblings=siblings):
        with pytest.raises(OverloadError), front.gate.passage(FLOW, siblings=siblings):
            raise refusal
        front.ask()
    with pytest.raises(OverloadError), front.gate.passage(FLOW, siblings=siblings):
        raise refusal
    with pytest.raises(OverloadError):
        front.ask()


def test_no_more_refusals_are_repeated_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_gate, "MAX_HOLDS", 2)
    front = Front()
    # The second refusal of "a" is that of a request which is served before the others.
    for flow, priority in (("a", 0), ("b", 0), ("a", -1), ("c", 0)):
        with pytest.raises(OverloadError, match="full"), front.gate.passage(flow, None, priority):
            raise OverloadError("full", retry_after_s=3.0, reason="queue_full")
    front.ask(flow="b")
    for flow in "ac":
        with pytest.raises(OverloadError) as held:
            front.ask(flow=flow)
        assert held.value.reason == "held"
