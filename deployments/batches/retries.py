"""Which answers to a line of a batch are asked for again, and when. Pure."""

from __future__ import annotations

from deployments.batches.values import InsideAnswer

MAX_FAILURES = 3
"""Failures of ours after which a line is answered by the last of them."""
MAX_WAIT_S = 60.0
_COME_BACK = (429, 503)
_FAILURES = (500, 502, 504)


class Retries:
    """What one line has met so far.

    Who is told to come back does so, until the batch expires; a failure is tried a few times. Without a time given, or
    at a failure, the wait doubles with every attempt.
    """

    def __init__(self) -> None:
        self._num_waits = 0
        self._num_failures = 0

    def wait_s(self, answer: InsideAnswer) -> float | None:
        """Return how many seconds to wait before the line is asked for again, None where its answer stays."""
        if answer.status in _FAILURES:
            self._num_failures += 1
        elif answer.status not in _COME_BACK:
            return None
        if self._num_failures >= MAX_FAILURES:
            return None
        self._num_waits += 1
        return answer.retry_after_s or min(MAX_WAIT_S, 2.0 ** min(self._num_waits - 1, 10))
