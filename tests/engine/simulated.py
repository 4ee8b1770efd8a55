"""An engine on a scripted device whose steps take as long as a formula says, on a clock that only steps move."""

from __future__ import annotations

from collections import deque

from engine.config import ResolvedConfig
from engine.engine import Engine
from engine.request import FinishReason
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_costs import StepCosts
from engine.step import StepPlan, StepResult
from tests.engine.scripted import ScriptedGate, ScriptedRunner
from tests.oracles.naive_scheduler import EOS_IDS


class ExactCosts(StepCosts):
    """Costs that are known without measuring, or have been once."""

    has_decode_steps = True

    def __init__(self, *, base_s: float, row_s: float, token_s: float, is_known: bool = True) -> None:
        super().__init__()
        self._exact = base_s, row_s, token_s
        self._is_known = is_known

    def is_known(self, now_s: float) -> bool:
        return self._is_known

    def step_s(self, num_rows: int) -> float:
        return self._exact[0] + self._exact[1] * num_rows

    def prompt_s(self, num_tokens: float, num_pairs: float = 0.0) -> float:
        return self._exact[2] * num_tokens


class TimedRunner(ScriptedRunner):
    """Steps take what `costs` says, one after the other."""

    def __init__(self, config: ResolvedConfig, gate: ScriptedGate, costs: StepCosts, steps_ahead: int) -> None:
        super().__init__(config, gate, steps_ahead=steps_ahead)
        self._costs = costs
        self._ends: deque[float] = deque()
        self.now_s = 0.0

    def submit(self, plan: StepPlan) -> None:
        super().submit(plan)
        num_prompt = plan.num_prefill_tokens
        began_s = max(self.now_s, self._ends[-1] if self._ends else 0.0)
        self._ends.append(began_s + self._costs.step_s(plan.num_tokens - num_prompt) + self._costs.prompt_s(num_prompt))
        if not self.steps_ahead:
            self.now_s = self._ends[-1]

    def collect(self) -> StepResult:
        self.now_s = max(self.now_s, self._ends.popleft())
        return super().collect()


class SimulatedEngine:
    """An engine in simulated time; `costs` are what its door reckons with, exact ones unless it has to learn them."""

    def __init__(
        self, config: ResolvedConfig, machine: ExactCosts, *, steps_ahead: int = 0, learns: bool = False
    ) -> None:
        gate = ScriptedGate()
        self.runner = TimedRunner(config, gate, machine, steps_ahead)
        self.scheduler = Scheduler(config, gate, EOS_IDS, lambda: self.runner.now_s)
        if not learns:
            self.scheduler.admission.costs = machine
        self.engine = Engine(
            config,
            self.scheduler,
            self.runner,
            adapters=None,
            clock=lambda: self.runner.now_s,  # type: ignore[arg-type]
        )
        self.reason_by_id: dict[str, FinishReason] = {}
        self.ended_at_by_id: dict[str, float] = {}

    @property
    def now_s(self) -> float:
        return self.runner.now_s

    def step(self) -> None:
        for emission in self.engine.step():
            if emission.finish_reason is not None:
                self.reason_by_id[emission.request_id] = emission.finish_reason
                self.ended_at_by_id[emission.request_id] = self.now_s

    def finish(self, names: list[str]) -> None:
        for _ in range(5000):
            if all(name in self.reason_by_id for name in names):
                return
            self.step()
        raise AssertionError("a request is starved")
