"""Refuses in the gateway who would be late behind it, before a tokenizer, a classifier or an engine works for it.

Two things are known here. How many requests wait for their first text, and how fast first texts come: by Little's law
the next one waits as long as these take, wherever on the way the queue is. Where little is asked, little is known of
how fast they could come; so nobody is refused before those who wait show that there is a queue. And what an engine has
just refused: what would wait behind the same queue is refused for a moment, then one is let through to ask again.

A flow with fewer requests inside than its share is let in all the same: the queue is not its doing, and engines serve
flows fairly. Lives on the gateway's event loop; pure but for the clock.

**Source:** Little, "A Proof for the Queuing Formula L = λW" (1961).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import OverloadError

NEW_SHARE = 0.05
MIN_PASSED = 8
"""Requests that have passed before anything is foretold from them."""
MAX_QUIET_S = 5.0
"""Where nobody has passed for so long, the waits of those who have are no sign of a queue any more."""
PRESSED_SHARE = 0.5
"""Of the bound: waits beyond it show that there is a queue."""
MIN_INSIDE = 4
"""So many may always wait: a server that is slow by itself is not overloaded."""
HOLD_SHARE = 0.25
"""Of the wait that is allowed: so long an engine's refusal is repeated, and its queue does not run empty meanwhile."""
MAX_HOLDS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One request that waits for its first text."""

    flow: Hashable
    priority: int


class _Hold(NamedTuple):
    """An engine's refusal, repeated until a time to requests that it did not rank before the one that was refused."""

    until_s: float
    back_at_s: float
    priority: int


class FrontGate:
    """The door to one model, in one gateway.

    Args:
        max_wait_s: longest wait for the first text that a new request may be foretold.

    Attributes:
        refused_by_reason: how many were refused: "wait", "held" in an engine's stead, or "replicas_full" by Serve, of
            which no engine hears.
    """

    def __init__(self, *, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._inside = Counter[Hashable]()
        self._entered_s_by_passage: dict[Passage, float] = {}
        self._num_passed = 0
        self._interval_s = self._mean_wait_s = 0.0
        self._passed_at_s = self._crowded_since_s = clock()
        self._held_by_flow: OrderedDict[Hashable, _Hold] = OrderedDict()
        self.refused_by_reason: dict[str, int] = {}

    def wait_s(self, priority: int = 0) -> float:
        """Return the seconds that a request of a priority would wait for its first text; 0 where that is unknown."""
        if self._num_passed < MIN_PASSED:
            return 0.0
        return self._interval_s * sum(passage.priority <= priority for passage in self._entered_s_by_passage)

    @contextmanager
    def passage(self, flow: Hashable, timeout_s: float | None = None, priority: int = 0) -> Iterator[Passage]:
        """Let a request in until its first text (`end`) or the end of the block.

        Args:
            flow: requests of one wait behind the same queue.
            timeout_s: the request's own bound, besides the gate's.
            priority: lower is served first.

        Raises:
            OverloadError: it would be late.
        """
        self._check(flow, self._max_wait_s if timeout_s is None else min(timeout_s, self._max_wait_s), priority)
        now_s = self._clock()
        if not self._entered_s_by_passage:
            self._crowded_since_s = now_s
        passage = Passage(flow, priority)
        self._entered_s_by_passage[passage] = now_s
        self._inside[flow] += 1
        try:
            yield passage
        except OverloadError as error:
            if error.reason in ("queue_full", "queue_time"):
                self._hold(flow, error.retry_after_s, priority)
            elif error.reason == "replicas_full":
                self._count(error.reason)
            raise
        finally:
            self.end(passage, has_passed=False)

    def end(self, passage: Passage, *, has_passed: bool = True) -> None:
        """Note that a first text is there, or will never be; only the first call counts."""
        entered_s = self._entered_s_by_passage.pop(passage, None)
        if entered_s is None:
            return
        self._inside[passage.flow] -= 1
        if not self._inside[passage.flow]:
            del self._inside[passage.flow]
        if not has_passed:
            return
        now_s = self._clock()
        # Between two first texts, as long as somebody waited.
        took_s = now_s - max(self._passed_at_s, self._crowded_since_s)
        self._num_passed += 1
        weight = max(NEW_SHARE, 1 / self._num_passed)
        self._interval_s += weight * (took_s - self._interval_s)
        self._mean_wait_s += weight * (now_s - entered_s - self._mean_wait_s)
        self._passed_at_s = now_s

    def _check(self, flow: Hashable, bound_s: float, priority: int) -> None:
        now_s, hold = self._clock(), self._held_by_flow.get(flow)
        if hold is not None and now_s < hold.until_s and priority >= hold.priority:
            raise self._refusal("held", hold.back_at_s - now_s)
        wait_s = self.wait_s(priority)
        if wait_s <= bound_s or len(self._entered_s_by_passage) < MIN_INSIDE or self._has_share(flow, bound_s):
            return
        if self._longest_wait_s(now_s) > PRESSED_SHARE * bound_s:
            raise self._refusal("wait", wait_s - bound_s)

    def _longest_wait_s(self, now_s: float) -> float:
        """Return the longer of what was waited in the mean of late, and what the oldest has waited so far."""
        # The first of a dictionary is the oldest.
        oldest_s = now_s - next(iter(self._entered_s_by_passage.values()))
        return oldest_s if now_s - self._passed_at_s > MAX_QUIET_S else max(oldest_s, self._mean_wait_s)

    def _has_share(self, flow: Hashable, bound_s: float) -> bool:
        """Whether a flow has fewer inside than an equal part of those who could be served in time."""
        num_flows = len(self._inside.keys() | {flow})
        return num_flows > 1 and self._inside[flow] + 1 <= bound_s / self._interval_s / num_flows

    def _hold(self, flow: Hashable, retry_after_s: float, priority: int) -> None:
        now_s = self._clock()
        held_s = min(retry_after_s, HOLD_SHARE * self._max_wait_s)
        self._held_by_flow[flow] = _Hold(now_s + held_s, now_s + retry_after_s, priority)
        self._held_by_flow.move_to_end(flow)
        if len(self._held_by_flow) > MAX_HOLDS:
            self._held_by_flow.popitem(last=False)

    def _refusal(self, reason: str, retry_after_s: float) -> OverloadError:
        self._count(reason)
        message = "Too many requests are waiting for this model."
        return OverloadError(message, retry_after_s=max(1.0, retry_after_s), reason=reason)

    def _count(self, reason: str) -> None:
        self.refused_by_reason[reason] = self.refused_by_reason.get(reason, 0) + 1
