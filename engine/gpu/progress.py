"""Log the progress of a long phase of the start: a bar every few seconds, and a last one at the end.

compiling kernels [##########..............] 44 of 104, 12 s
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)

WIDTH = 24
PERIOD_S = 5.0
"""A log is read by people: a phase of one minute logs a dozen lines."""


class Progress:
    """The progress of one phase of the start.

    Args:
        what: description of the phase in the log lines.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._clock = clock
        self._started_s = self._told_s = clock()

    def reach(self, done: int, total: int) -> None:
        """Record the progress; log it if everything is done or `PERIOD_S` has passed since the last line."""
        now_s = self._clock()
        if done < total and now_s - self._told_s < PERIOD_S:
            return
        self._told_s = now_s
        filled = WIDTH * done // total
        bar = "#" * filled + "." * (WIDTH - filled)
        _logger.info("%s [%s] %d of %d, %.0f s", self._what, bar, done, total, now_s - self._started_s)
