"""Steps before the first request: they tell what steps take, and leave nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.config import ResolvedConfig
from engine.engine import Engine
from engine.errors import OverloadError
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_costs import StepCosts
from engine.step import StepResult
from engine.warm_up import warm_up
from tests.engine.scripted import ScriptedGate, ScriptedRunner, a_config, a_request
from tests.engine.test_engine import NoAdapters
from tests.oracles.naive_scheduler import EOS_IDS, answer_alone

BASE_S, ROW_S, TOKEN_S = 0.01, 0.002, 0.0005
CONFIG = a_config(max_model_len=2048, max_batched_tokens=1024, max_num_seqs=32, num_blocks=1024, max_queue_s=0.5)


class Adapters(ScriptedGate, NoAdapters):
    """Both views of no adapters."""


class TimedRunner(ScriptedRunner):
    """A device whose steps take what the model of step costs says."""

    now_s = 0.0
    num_collected = 0

    def collect(self) -> StepResult:
        plan = self.plans[self.num_collected]
        self.num_collected += 1
        self.now_s += BASE_S + plan.num_decodes * ROW_S + plan.num_prefill_tokens * TOKEN_S
        return super().collect()


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_steps_are_measured(steps_ahead: int) -> None:
    runner, costs = TimedRunner(CONFIG, ScriptedGate(), steps_ahead=steps_ahead), StepCosts()
    warm_up(CONFIG, runner, Adapters(), costs, lambda: runner.now_s)
    assert costs.is_known(runner.now_s)
    for num_rows in (1, 8, 32):
        assert costs.step_s(num_rows) == pytest.approx(BASE_S + num_rows * ROW_S)
    assert costs.prompt_s(100) == pytest.approx(100 * TOKEN_S, rel=0.1)


def test_steps_of_a_model_that_makes_vectors_only_are_measured() -> None:
    """It was never judged: its inputs are prompts, and until eight other steps were seen nothing was known of those."""
    config = replace(CONFIG, generates=False)
    runner, costs = TimedRunner(config, ScriptedGate()), StepCosts()
    warm_up(config, runner, Adapters(), costs, lambda: runner.now_s)
    assert costs.is_known(runner.now_s)
    assert costs.prompt_s(100) == pytest.approx(100 * TOKEN_S, rel=0.1)


def test_no_two_rows_are_alike() -> None:
    """Rows with the same tokens choose the same experts: steps of 16 seemed to take a quarter of what they do."""
    runner = TimedRunner(CONFIG, ScriptedGate())
    warm_up(CONFIG, runner, Adapters(), StepCosts(), lambda: runner.now_s)
    widest = max(runner.plans, key=lambda plan: len(plan.rows))
    assert len({row.request.prompt_ids for row in widest.rows}) == len(widest.rows) == 16
    assert len({row.request.params.seed for row in widest.rows}) == 16


def test_a_burst_upon_a_fresh_engine_is_judged() -> None:
    runner, costs = TimedRunner(CONFIG, ScriptedGate()), StepCosts()
    warm_up(CONFIG, runner, Adapters(), costs, lambda: runner.now_s)
    scheduler = Scheduler(CONFIG, Adapters(), EOS_IDS, lambda: runner.now_s, costs=costs)
    engine = Engine(CONFIG, scheduler, runner, adapters=Adapters(), clock=lambda: runner.now_s)
    for number in range(CONFIG.max_num_seqs):
        engine.add(a_request(str(number), max_tokens=100))
    with pytest.raises(OverloadError, match="would wait"):
        engine.add(a_request("late", max_tokens=100))


def test_the_shortest_context_that_can_be_measured_is() -> None:
    """No longer prompt fits than those of the answers."""
    config = a_config(max_model_len=25, max_batched_tokens=32)
    runner, costs = TimedRunner(config, ScriptedGate()), StepCosts()
    warm_up(config, runner, Adapters(), costs, lambda: runner.now_s)
    assert costs.is_known(runner.now_s)


@pytest.mark.parametrize("steps_ahead", [0, 1])
@pytest.mark.parametrize("failing", [frozenset[str](), frozenset({"warm-up-0", "warm-up-3"})])
def test_nothing_is_left_behind(steps_ahead: int, failing: frozenset[str]) -> None:
    config = a_config(max_model_len=48, max_batched_tokens=32, max_num_seqs=3, max_queued_requests=1, max_queue_s=0.0)
    runner, costs = TimedRunner(config, ScriptedGate(), failing, steps_ahead), StepCosts()
    warm_up(config, runner, Adapters(), costs, lambda: runner.now_s)
    scheduler = Scheduler(config, Adapters(), EOS_IDS, lambda: runner.now_s, costs=costs)
    engine = Engine(config, scheduler, runner, adapters=Adapters(), clock=lambda: runner.now_s)
    request = a_request("first", range(20), max_tokens=8)
    engine.add(request)
    emissions = [engine.step() for _ in range(20)]
    tokens = tuple(token for step in emissions for emission in step for token in emission.token_ids)
    assert tokens == answer_alone(request, config.max_model_len).token_ids


@pytest.mark.parametrize("config", [a_config(max_model_len=24), a_config(max_batched_tokens=16)])
def test_nothing_is_run_where_nothing_can_be_measured(config: ResolvedConfig) -> None:
    runner = TimedRunner(config, ScriptedGate())
    warm_up(config, runner, Adapters(), StepCosts())
    assert not runner.plans
