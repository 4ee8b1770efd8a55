"""Bounds how long a call waits while Serve lists no replica of its model: Serve's router would wait for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from deployments.errors import UnavailableError
from deployments.handle_calls import RETRY_AFTER_S
from deployments.routing.board import Board

CHECK_S, NUM_CHECKS = 10.0, 60
"""Ten minutes, as OpenAI's clients wait: a large model that was scaled to zero may take that long to start."""


class Patience:
    """Fails one call if `NUM_CHECKS` checks in a row find no replica; `end` it once the call has brought anything.

    Args:
        fail: called with an UnavailableError.
    """

    def __init__(self, board: Board, fail: Callable[[Exception], None]) -> None:
        self._board = board
        self._fail = fail
        self._num_absent = 0
        self._wait()

    def end(self) -> None:
        """Wait no longer, as the call has been answered or given up. Idempotent."""
        self._timer.cancel()

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(CHECK_S, self._check)

    def _check(self) -> None:
        self._num_absent = self._num_absent + 1 if self._board.is_deserted() else 0
        if self._num_absent < NUM_CHECKS:
            self._wait()
        else:
            self._fail(UnavailableError("No replica of this model is running now.", retry_after_s=RETRY_AFTER_S))
