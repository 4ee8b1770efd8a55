"""The time of each step: it begins when it is planned or, if the device is busy then, when the step before it ends.

A step may be put aside for one that is planned later, whose time does not count towards it. Pure.
"""

from __future__ import annotations

from engine.step import StepPlan


class StepClock:
    """Measures the steps, whose ends are recorded in the order in which they are computed.

    Attributes:
        start_s, end_s: when the newest finished step began and ended.
        step_s: its seconds.
        per_token_s: the same, divided by its tokens.
        whole_s: its seconds with the host's work since the step before it.
        token_s: sum of `per_token_s` over all steps of those that decode.
    """

    def __init__(self) -> None:
        self.start_s = self.end_s = self.step_s = self.per_token_s = self.whole_s = self.token_s = 0.0
        self._planned_s: dict[int, float] = {}
        self._free_s = 0.0

    def rest(self, now_s: float) -> None:
        """Record that there was nothing to compute until now; that time counts towards no step."""
        self._free_s = max(self._free_s, now_s)

    def begin(self, step_id: int, now_s: float) -> None:
        """Record that a plan was made; it is submitted to the device at once."""
        self._planned_s[step_id] = now_s

    def end(self, plan: StepPlan, now_s: float) -> None:
        """Record that a plan's results are available."""
        self.start_s, self.end_s = max(self._planned_s.pop(plan.step_id, now_s), self._free_s), now_s
        self.step_s = now_s - self.start_s
        put_aside = [step_id for step_id in self._planned_s if step_id < plan.step_id]
        if put_aside:
            # An earlier step was put aside for this one, whose time must not count towards it.
            self.whole_s = self.step_s
            self._free_s += self.step_s
            for step_id in put_aside:
                self._planned_s[step_id] += self.step_s
        else:
            self.whole_s, self._free_s = now_s - self._free_s, now_s
        self.per_token_s = self.step_s / plan.num_tokens
        # A step of newcomers alone (`engine.scheduling.own_step`) has no row of those that decode.
        if not all(row.is_admission for row in plan.rows):
            self.token_s += self.per_token_s
