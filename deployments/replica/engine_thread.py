"""The only bridge between an engine's step loop and an event loop: a dedicated thread, and one hop per step.

A blocked event loop does not delay the engine, and a long step does not block the event loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from engine import machine
from engine.request import Emission

if TYPE_CHECKING:
    from engine.engine import Engine

MAX_STEP_S_BY_DEVICE = {"cuda": 60.0, "cpu": 600.0}
"""An engine that has work but finishes no step for so long counts as hung. On a CPU a full step of a large model takes
minutes."""
STOP_S = 30.0
"""Longest wait for an engine that stops: its threads may read an adapter, or a cache, from a disk that hangs."""


class EngineThread:
    """Runs one engine until `stop`.

    Args:
        on_step: called on the event loop with the emissions of each step, in step order.
        on_failure: called on the engine's thread if the engine fails, before its streams hear of it.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[Sequence[Emission]], None],
        on_failure: Callable[[], object] = lambda: None,
    ) -> None:
        self.engine = engine
        self._loop = loop
        self._on_step = on_step
        self._on_failure = on_failure
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Stop the engine after the current step, waiting for at most `STOP_S`. Live requests end with FAILED first."""
        self.engine.stop()
        await asyncio.to_thread(self._thread.join, STOP_S)
        # The thread has scheduled the last step's emissions on the loop: let it deliver them.
        await asyncio.sleep(0)

    def trouble(self) -> str | None:
        """Return one sentence on why the engine is unhealthy, or None if it makes progress."""
        if not self._thread.is_alive():
            return "The engine's thread has ended."
        if not self.engine.is_alive:
            return "The engine has ended."
        snapshot = self.engine.snapshot()
        stalled_s = time.monotonic() - snapshot.last_progress_s
        if snapshot.num_running + snapshot.num_waiting and stalled_s > MAX_STEP_S_BY_DEVICE[self.engine.config.device]:
            return f"The engine has work, but has finished no step for {stalled_s:.0f} seconds."
        return None

    def _run(self) -> None:
        # On a CPU this thread computes, so it lowers its priority. With a GPU it must not: the GPU waits for launches.
        if self.engine.config.device == "cpu":
            machine.stand_back()
        self.engine.run(self._hand_over)
        if self.engine.has_failed:
            self._on_failure()

    def _hand_over(self, emissions: list[Emission]) -> None:
        if self.engine.has_failed:
            self._on_failure()
        # If the loop is closed, the process is exiting and there is nobody left to notify.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_step, emissions)
