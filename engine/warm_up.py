"""Steps that an engine runs for itself before it serves, so that admission judges the first requests, too.

Until admission knows what a step takes here, it accepts every request, and the last of a burst upon a fresh replica
would wait however long. Besides, the weights are then in memory before anybody waits for them.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import count, islice
from random import Random

from engine.adapter_pool import AdapterPool
from engine.config import ResolvedConfig
from engine.engine import Engine
from engine.request import Pooling, Request, RequestId, SamplingParams
from engine.runner import Runner
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_costs import MIN_PROMPT_TOKENS, MIN_STEPS, StepCosts

_logger = logging.getLogger(__name__)

NUM_ROWS = 16
NUM_TOKENS = MIN_STEPS + 1
"""Of an answer; the first one belongs to the step of its prompt."""
ENOUGH_S = 0.25
"""Longer prompts are tried until one takes this long: on a fast device, a short one tells little of a token's cost."""


def warm_up(
    config: ResolvedConfig,
    runner: Runner,
    adapters: AdapterPool,
    costs: StepCosts,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Compute single tokens of one row and of several, and longer and longer prompts; record what the steps take.

    Nothing of the cache or of the runner's rows stays in use. Does nothing with a context too short to measure.
    """
    most_tokens = min(config.max_model_len, config.max_batched_tokens) - NUM_TOKENS
    if most_tokens < MIN_PROMPT_TOKENS:
        return
    started_s = clock()
    # The very first steps touch their memory for the first time, and tell nothing of later ones.
    _Trial(config, runner, adapters, StepCosts(), clock).run(1, MIN_PROMPT_TOKENS, 2)
    trial = _Trial(config, runner, adapters, costs, clock)
    num_rows, num_prompt = min(NUM_ROWS, config.max_num_seqs), MIN_PROMPT_TOKENS
    trial.compute_tokens(1)
    trial.compute_tokens(num_rows)
    took_s = 0.0
    while took_s < ENOUGH_S and num_prompt < most_tokens:
        num_prompt = min(4 * num_prompt, most_tokens)
        took_s = trial.run(1, num_prompt, 1)
    _logger.info(
        "warmed up in %.1f s: a step of one row takes %.1f ms, one of %d rows %.1f ms; %.0f prompt tokens a second",
        *(clock() - started_s, 1e3 * costs.step_s(1), num_rows, 1e3 * costs.step_s(num_rows)),
        costs.prompt_tokens_per_s,
    )


class _Trial:
    """An engine on the same runner, whose own scheduler keeps no prefixes, drafts, lends and refuses nothing."""

    def __init__(
        self,
        config: ResolvedConfig,
        runner: Runner,
        adapters: AdapterPool,
        costs: StepCosts,
        clock: Callable[[], float],
    ) -> None:
        apart = replace(
            config,
            enable_prefix_cache=False,
            num_speculative_tokens=0,
            lent_run_blocks=0,
            max_queue_s=math.inf,
            max_queued_requests=NUM_ROWS,
        )
        scheduler = Scheduler(apart, adapters, (), clock, costs=costs)
        self._engine = Engine(apart, scheduler, runner, adapters=adapters, clock=clock)
        self._steps_ahead, self._clock = runner.steps_ahead, clock
        self._generates, self._vocab_size = config.generates, config.vocab_size or 1
        self._numbers = count()

    def compute_tokens(self, num_rows: int) -> None:
        """Run enough steps with a single token of each row: of answers, or of inputs if the model generates none."""
        if self._generates:
            self.run(num_rows, MIN_PROMPT_TOKENS, NUM_TOKENS)
        else:
            for _ in range(NUM_TOKENS):
                self.run(num_rows, 1, 0)

    def run(self, num_requests: int, num_prompt: int, num_output: int) -> float:
        """Run requests to their end, all at once, and return the seconds that they took."""
        started_s = self._clock()
        for number in islice(self._numbers, num_requests):
            # All different: equal tokens would choose the same few experts.
            params = SamplingParams(max_tokens=num_output, seed=number, ignore_eos=True)
            self._engine.add(
                Request(
                    request_id=RequestId(f"warm-up-{number}"),
                    prompt_ids=tuple(Random(number).choices(range(self._vocab_size), k=num_prompt)),
                    params=params if self._generates else replace(params, max_tokens=0),
                    pooling=None if self._generates else Pooling.LAST,
                )
            )
        while num_requests:
            num_requests -= sum(emission.finish_reason is not None for emission in self._engine.step())
        for _ in range(self._steps_ahead):
            # A request that failed has left a step in flight.
            self._engine.step()
        return self._clock() - started_s
