"""An engine whose every step pauses wherever it may, and whom newcomers meet then."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from engine.engine import Engine
from engine.scheduling.own_step import OwnSteps
from engine.step import StepPlan

PAUSES_BETWEEN = 3


class _EveryPause:
    """A wish that is never taken back; who would take it back learns of a pause, or of a step that begins."""

    def __init__(self, on_clear: Callable[[], None]) -> None:
        self.clear = on_clear

    def set(self) -> None:
        pass


@contextmanager
def interrupted(
    engine: Engine, latecomers: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[StepPlan]]:
    """Have latecomers add themselves while steps are paused; yields the steps that went before others."""
    asides: list[StepPlan] = []
    num_clears = 0

    def on_clear() -> None:
        nonlocal num_clears
        num_clears += 1
        if latecomers and num_clears % PAUSES_BETWEEN == 0:
            latecomers.pop()()

    wish, plan_newcomers = engine._pause_wish, engine._scheduler.plan_newcomers

    def noted(prefill_cap: int | None = None, *, num_spared: int = 2) -> StepPlan | None:
        plan = plan_newcomers(prefill_cap, num_spared=num_spared)
        if plan is not None and engine._is_computing:
            asides.append(plan)
        return plan

    with monkeypatch.context() as patch:
        patch.setattr(OwnSteps, "pays", lambda own, running, waiting, num_spared: own.may_be and bool(running))
        patch.setattr(engine, "_pause_wish", _EveryPause(on_clear))
        patch.setattr(engine._scheduler, "plan_newcomers", noted)
        wish.set()
        yield asides
        wish.clear()
