"""Decides which lines of a batch are retried, and when. Pure."""

from __future__ import annotations

from deployments.batches.values import InsideAnswer

MAX_FAILURES = 3
"""Server failures after which the last one becomes the line's answer."""
MAX_WAIT_S = 60.0
_COME_BACK = (429, 503)
_FAILURES = (500, 502, 504)


class Retries:
    """The retry state of one line.

    Answers that ask the client to come back are retried until the batch expires; failures, a few times, unless they say
    that they would recur. Unless the answer says when to come back, the wait doubles with each attempt.
    """

    def __init__(self) -> None:
        self._num_waits = 0
        self._num_failures = 0

    def wait_s(self, answer: InsideAnswer) -> float | None:
        """Return the seconds to wait before retrying the line, or None if the answer is final."""
        if answer.is_final:
            return None
        if answer.status in _FAILURES:
            self._num_failures += 1
        elif answer.status not in _COME_BACK:
            return None
        if self._num_failures >= MAX_FAILURES:
            return None
        self._num_waits += 1
        return answer.retry_after_s or min(MAX_WAIT_S, 2.0 ** min(self._num_waits - 1, 10))
