"""Admission in the gateway: refuse requests that would be late before tokenizer, classifier or engine work on them.

The gate decides by two things. First, how many requests wait for their first text, and at what rate first texts come:
by Little's law these give the next request's wait, wherever the queue is. At low load the rate says little about
capacity, so nothing is refused until actual waits show that there is a queue. Second, an engine's recent refusal:
requests that would join the same queue are refused for a short time, or until half of those ahead have left; then one
is let through to probe.

A flow with fewer requests inside than its share is admitted all the same: it did not cause the queue, and engines serve
flows fairly. Bound to the gateway's event loop; pure except for the clock.

**Source:** Little, "A Proof for the Queuing Formula L = lambda W" (1961).
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from deployments.siblings import Siblings
from engine.errors import OverloadError

NEW_SHARE = 0.05
MIN_PASSED = 8
"""Requests that must have passed before waits are predicted."""
MAX_QUIET_S = 5.0
"""If none has passed for so long, past waits are no longer a sign of a queue."""
PRESSED_SHARE = 0.5
"""Share of the bound; longer waits show that there is a queue."""
MIN_INSIDE = 4
"""So many may always wait: a server that is slow without load is not overloaded."""
HOLD_SHARE = 0.25
"""Share of the allowed wait for which an engine's refusal is repeated; its queue does not run empty in that time."""
MAX_HOLDS = 4096
CROWD_SHARE = 0.5
"""With less than this share of the requests that were unfinished at a refusal, it no longer stands."""


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """One request that waits for its first text."""

    flow: Hashable
    priority: int
    siblings: Siblings


class _Hold(NamedTuple):
    """An engine's refusal, repeated until `until_s` for requests that do not rank before the refused one.

    Attributes:
        min_here: with fewer unfinished requests it no longer stands: clients that leave empty the queue at once.
    """

    until_s: float
    back_at_s: float
    priority: int
    min_here: float

    def holds(self, now_s: float, priority: int, num_here: int) -> bool:
        """Tell whether it is repeated for a new request."""
        return now_s < self.until_s and priority >= self.priority and num_here >= self.min_here


class FrontGate:
    """Admission to one model in one gateway.

    Args:
        max_wait_s: longest predicted wait for the first text with which a new request is admitted.

    Attributes:
        refused_by_reason: number of refusals: "wait" (predicted), "held" (repeating an engine's refusal) or
            "replicas_full" (by Serve, before any engine).
    """

    def __init__(self, *, max_wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._inside = Counter[Hashable]()
        self._entered_s_by_passage: dict[Passage, float] = {}
        self._num_here = 0
        self._num_passed = 0
        self._interval_s = self._mean_wait_s = 0.0
        self._passed_at_s = self._crowded_since_s = clock()
        self._held_by_flow: OrderedDict[Hashable, _Hold] = OrderedDict()
        self.refused_by_reason = Counter[str]()

    def wait_s(self, priority: int = 0) -> float:
        """Return the predicted wait in seconds for a new request's first text; 0 if unknown."""
        if self._num_passed < MIN_PASSED:
            return 0.0
        return self._interval_s * sum(passage.priority <= priority for passage in self._entered_s_by_passage)

    @contextmanager
    def passage(
        self, flow: Hashable, timeout_s: float | None = None, priority: int = 0, siblings: Siblings | None = None
    ) -> Iterator[Passage]:
        """Admit a request; it counts as inside until its first text (`end`) or the end of the block.

        The first of siblings is checked for all, as the others may wait for it.

        Args:
            flow: requests of one flow wait in the same queue.
            timeout_s: the request's own bound, besides the gate's.
            priority: lower is served first.

        Raises:
            OverloadError: the request would be late.
        """
        siblings = siblings or Siblings()
        if not siblings.have_begun:
            self._check(flow, self._max_wait_s if timeout_s is None else min(timeout_s, self._max_wait_s), priority)
        now_s = self._clock()
        if not self._entered_s_by_passage:
            self._crowded_since_s = now_s
        passage = Passage(flow, priority, siblings)
        self._entered_s_by_passage[passage] = now_s
        self._inside[flow] += 1
        self._num_here += 1
        try:
            with siblings.asked(passage):
                yield passage
        except OverloadError as error:
            if error.reason in ("queue_full", "queue_time") and not siblings.may_wait(error):
                self._hold(flow, error.retry_after_s, priority)
            elif error.reason == "replicas_full":
                self.refused_by_reason[error.reason] += 1
            raise
        finally:
            self._num_here -= 1
            self.end(passage, has_passed=False)

    def end(self, passage: Passage, *, has_passed: bool = True) -> None:
        """Record that the first text has come, or never will; only the first call counts."""
        entered_s = self._entered_s_by_passage.pop(passage, None)
        if entered_s is None:
            return
        self._inside[passage.flow] -= 1
        if not self._inside[passage.flow]:
            del self._inside[passage.flow]
        if not has_passed:
            return
        passage.siblings.leave_queue(passage)
        now_s = self._clock()
        # Time between two first texts, counting only while requests waited.
        took_s = now_s - max(self._passed_at_s, self._crowded_since_s)
        self._num_passed += 1
        weight = max(NEW_SHARE, 1 / self._num_passed)
        self._interval_s += weight * (took_s - self._interval_s)
        self._mean_wait_s += weight * (now_s - entered_s - self._mean_wait_s)
        self._passed_at_s = now_s

    def _check(self, flow: Hashable, bound_s: float, priority: int) -> None:
        now_s, hold = self._clock(), self._held_by_flow.get(flow)
        if hold is not None and hold.holds(now_s, priority, self._num_here):
            raise self._refusal("held", hold.back_at_s - now_s)
        wait_s = self.wait_s(priority)
        if wait_s <= bound_s or len(self._entered_s_by_passage) < MIN_INSIDE or self._has_share(flow, bound_s):
            return
        if self._longest_wait_s(now_s) > PRESSED_SHARE * bound_s:
            raise self._refusal("wait", wait_s - bound_s)

    def _longest_wait_s(self, now_s: float) -> float:
        """Return the longer of the recent mean wait and the oldest waiting request's wait so far, in seconds."""
        # Dictionaries keep insertion order: the first entry is the oldest.
        oldest_s = now_s - next(iter(self._entered_s_by_passage.values()))
        return oldest_s if now_s - self._passed_at_s > MAX_QUIET_S else max(oldest_s, self._mean_wait_s)

    def _has_share(self, flow: Hashable, bound_s: float) -> bool:
        """Tell whether a flow has fewer requests inside than an equal share of those that can be served in time."""
        num_flows = len(self._inside.keys() | {flow})
        return num_flows > 1 and self._inside[flow] + 1 <= bound_s / self._interval_s / num_flows

    def _hold(self, flow: Hashable, retry_after_s: float, priority: int) -> None:
        now_s = self._clock()
        held_s = min(retry_after_s, HOLD_SHARE * self._max_wait_s)
        # The refused request itself is still here.
        min_here = CROWD_SHARE * (self._num_here - 1)
        self._held_by_flow[flow] = _Hold(now_s + held_s, now_s + retry_after_s, priority, min_here)
        self._held_by_flow.move_to_end(flow)
        if len(self._held_by_flow) > MAX_HOLDS:
            self._held_by_flow.popitem(last=False)

    def _refusal(self, reason: str, retry_after_s: float) -> OverloadError:
        self.refused_by_reason[reason] += 1
        message = "Too many requests are waiting for this model."
        return OverloadError(message, retry_after_s=max(1.0, retry_after_s), reason=reason)
