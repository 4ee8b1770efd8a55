"""Says how far a long part of a start has come: a bar in the log every few seconds, and a last one when it is done.

compiling kernels [##########..............] 44 of 104, 12 s
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

WIDTH = 24
PERIOD_S = 5.0
"""A log is read by people: a start of a minute has a dozen lines of this."""


class Progress:
    """One part of a start.

    Args:
        what: is done, as its lines say it.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._started_s = self._told_s = clock()

    def reach(self, done: int, total: int) -> None:
        """Take it that so much is done, and say so where it is all, or nothing has been said for a while."""
        now_s = self._clock()
        if done < total and now_s - self._told_s < PERIOD_S:
            return
        self._told_s = now_s
        filled = WIDTH * done // total
        bar = "#" * filled + "." * (WIDTH - filled)
        _logger.info("%s [%s] %d of %d, %.0f s", self._what, bar, done, total, now_s - self._started_s)
