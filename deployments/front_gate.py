"""Refuses in the gateway who would be late behind it, before a tokenizer, a classifier or an engine works for it.

Two things are known here. How many requests wait for their first text, and how fast first texts come: by Little's law
the next one waits as long as these take, wherever on the way the queue is. And what an engine has just refused: what
would wait behind the same queue is refused for a moment, then one is let through to ask again.

A flow with fewer requests inside than its share is let in all the same: the queue is not its doing, and engines serve
flows fairly. Lives on the gateway's event loop; pure but for the clock.

**Source:** Little, "A Proof for the Queuing Formula L = λW" (1961).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

from engine.errors import OverloadError

NEW_SHARE = 0.05
MIN_PASSED = 8
"""Requests that have passed before anything is foretold from them."""
MAX_QUIET_S = 5.0
"""Where nobody has passed for so long, what was measured is no estimate any more."""
MIN_INSIDE = 4
"""So many may always wait: a server that is slow by itself is not overloaded."""
HOLD_SHARE = 0.25
"""Of the wait that is allowed: so long an engine's refusal is repeated, and its queue does not run empty meanwhile."""
MAX_HOLDS = 4096


class Passage:
    """One request that waits for its first text."""

    def __init__(self, gate: FrontGate, flow: Hashable) -> None:
        self._gate: FrontGate | None = gate
        self._flow = flow

    def end(self, *, has_passed: bool = True) -> None:
        """Note that the text is there, or will never be; only the first call counts."""
        gate, self._gate = self._gate, None
        if gate is not None:
            gate.note_end(self._flow, has_passed=has_passed)


class FrontGate:
    """The door to one model, in one gateway.

    Args:
        max_wait_s: longest wait for the first text that a new request may be foretold.

    Attributes:
        refused_by_reason: how many were refused: "wait", or "held" in an engine's stead.
    """

    def __init__(self, *, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._inside = Counter[Hashable]()
        self._num_inside = self._num_passed = 0
        self._interval_s = 0.0
        self._passed_at_s = self._crowded_since_s = clock()
        self._held_by_flow: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()
        self.refused_by_reason: dict[str, int] = {}

    @property
    def wait_s(self) -> float:
        """Seconds that a request which comes now is expected to wait for its first text; 0 where that is unknown."""
        is_known = self._num_passed >= MIN_PASSED and self._clock() - self._passed_at_s <= MAX_QUIET_S
        return self._num_inside * self._interval_s if is_known else 0.0

    @contextmanager
    def passage(self, flow: Hashable, timeout_s: float | None = None) -> Iterator[Passage]:
        """Let a request in until the passage or the block ends.

        Args:
            flow: requests of one wait behind the same queue.
            timeout_s: the request's own bound, besides the gate's.

        Raises:
            OverloadError: it would be late.
        """
        self._check(flow, self._max_wait_s if timeout_s is None else min(timeout_s, self._max_wait_s))
        if self._num_inside == 0:
            self._crowded_since_s = self._clock()
        self._num_inside += 1
        self._inside[flow] += 1
        passage = Passage(self, flow)
        try:
            yield passage
        except OverloadError as error:
            if error.reason in ("queue_full", "queue_time"):
                self._hold(flow, error.retry_after_s)
            raise
        finally:
            passage.end(has_passed=False)

    def note_end(self, flow: Hashable, *, has_passed: bool) -> None:
        """Note that somebody waits no more; called by `Passage`."""
        self._num_inside -= 1
        self._inside[flow] -= 1
        if not self._inside[flow]:
            del self._inside[flow]
        if not has_passed:
            return
        now_s = self._clock()
        # Between two first texts, as long as somebody waited.
        took_s = now_s - max(self._passed_at_s, self._crowded_since_s)
        self._num_passed += 1
        self._interval_s += max(NEW_SHARE, 1 / self._num_passed) * (took_s - self._interval_s)
        self._passed_at_s = now_s

    def _check(self, flow: Hashable, bound_s: float) -> None:
        held_until_s, back_at_s = self._held_by_flow.get(flow, (0.0, 0.0))
        now_s = self._clock()
        if now_s < held_until_s:
            raise self._refusal("held", back_at_s - now_s)
        wait_s = self.wait_s
        if wait_s > bound_s and self._num_inside >= MIN_INSIDE and not self._has_share(flow, bound_s):
            raise self._refusal("wait", wait_s - bound_s)

    def _has_share(self, flow: Hashable, bound_s: float) -> bool:
        """Whether a flow has fewer inside than an equal part of those who could be served in time."""
        num_flows = len(self._inside.keys() | {flow})
        return num_flows > 1 and self._inside[flow] < bound_s / self._interval_s / num_flows

    def _hold(self, flow: Hashable, retry_after_s: float) -> None:
        now_s = self._clock()
        held_s = min(retry_after_s, HOLD_SHARE * self._max_wait_s)
        self._held_by_flow[flow] = now_s + held_s, now_s + retry_after_s
        self._held_by_flow.move_to_end(flow)
        if len(self._held_by_flow) > MAX_HOLDS:
            self._held_by_flow.popitem(last=False)

    def _refusal(self, reason: str, retry_after_s: float) -> OverloadError:
        self.refused_by_reason[reason] = self.refused_by_reason.get(reason, 0) + 1
        message = "Too many requests are waiting for this model."
        return OverloadError(message, retry_after_s=max(1.0, retry_after_s), reason=reason)
