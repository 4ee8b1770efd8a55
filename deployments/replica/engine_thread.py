"""The only bridge between an engine's step loop and an event loop: a thread of its own, and one hop for each step.

Whatever blocks the event loop does not hold up the engine, and a long step does not hold up the event loop.
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
"""A step that takes longer has hung. On a CPU a full step of a large model takes minutes."""


class EngineThread:
    """Runs one engine from `start` to `stop`.

    Args:
        on_step: called on the event loop with the emissions of one step, in order of the steps.
        max_step_s: seconds without a finished step, with work there, after which the engine counts as hung.
    """

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_step: Callable[[Sequence[Emission]], None],
        *,
        max_step_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._loop = loop
        self._on_step = on_step
        self._max_step_s = max_step_s
        self._clock = clock
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    async def stop(self) -> None:
        """End the engine after the step under way; live requests end with FAILED first."""
        self.engine.stop()
        await asyncio.to_thread(self._thread.join)
        # The last step's emissions were handed over before the thread ended: let the loop deliver them.
        await asyncio.sleep(0)

    def trouble(self) -> str | None:
        """Say in one sentence why the engine cannot be relied on, or None where it makes progress."""
        if not self._thread.is_alive():
            return "The engine's thread has ended."
        if not self.engine.is_alive:
            return "The engine has ended."
        snapshot = self.engine.snapshot()
        stalled_s = self._clock() - snapshot.last_progress_s
        if snapshot.num_running + snapshot.num_waiting and stalled_s > self._max_step_s:
            return f"The engine has work, but has finished no step for {stalled_s:.0f} seconds."
        return None

    def _run(self) -> None:
        # On a CPU this thread computes. A GPU waits for what it launches.
        if self.engine.config.device == "cpu":
            machine.stand_back()
        self.engine.run(self._hand_over)

    def _hand_over(self, emissions: list[Emission]) -> None:
        # A loop that has closed belongs to a process that is going away, and nobody is left to tell.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._on_step, emissions)
