"""Decides which waiting prompts begin in a step beside the prompts that it computes already. Pure: no torch.

Every request of a step gets its token when the step ends. A prompt that begins in a later step instead

- finds blocks in the cache that this step, or one in flight, computes for a request with the same prefix, and
- does not delay the first tokens of the prompts that this step completes,

at the cost of another step's fixed time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.cache.prefix_index import BlockName
from engine.config import ResolvedConfig
from engine.scheduling.live_request import LiveRequest
from engine.scheduling.step_costs import StepCosts

MIN_GAIN = 2.0
"""Smallest gain in relation to the cost: short prompts take longer than their share of a long one."""

MIN_TOKENS = 64
"""Prompt tokens of a step to which others are always added: it would hardly end sooner without them."""


class Beginnings:
    """The prompts of one step, and whether others had better begin later. Never holds up the first prompt of a step.

    Args:
        running: requests with a row; steps in flight may compute prompts of them.
    """

    def __init__(self, config: ResolvedConfig, costs: StepCosts, running: Iterable[LiveRequest]) -> None:
        self._costs = costs
        self._block_tokens = config.block_tokens
        # Blocks of layers with states cannot be reused without a state, which is kept for few of them.
        self._has_names = config.enable_prefix_cache and not config.num_snapshots
        self._coming: set[BlockName] = set()
        self._num_tokens = self._num_completed = 0
        for live in running:
            self._expect(live, live.num_settled, live.num_computed)

    def note(self, live: LiveRequest, end: int) -> None:
        """Record that the step computes a request's tokens up to `end`."""
        self._expect(live, live.num_computed, end)
        self._num_tokens += end - live.num_computed
        self._num_completed += end == live.num_tokens and live.first_token_at_s is None and not live.request.pooling

    def finds_more_later(self, names: Sequence[BlockName]) -> bool:
        """Whether it is worth waiting for blocks of others.

        Args:
            names: of the blocks that the waiting request need not compute if they are cached.
        """
        num_coming = sum(name in self._coming for name in names) if self._coming else 0
        return self._costs.prompt_s(num_coming * self._block_tokens) > MIN_GAIN * self._costs.fixed_s

    def delays_others(self, num_tokens: int, num_left: int) -> bool:
        """Whether first tokens come earlier on average without a prompt of `num_tokens` tokens in this step.

        To be asked only while nothing decodes: under load, more steps take throughput from everyone.

        Args:
            num_left: prompts that are not in this step yet: all of them would wait for another fixed cost.
        """
        gain_s, cost_s = self._num_completed * self._costs.prompt_s(num_tokens), num_left * self._costs.fixed_s
        return self._num_tokens >= MIN_TOKENS and gain_s > MIN_GAIN * cost_s

    def _expect(self, live: LiveRequest, start: int, end: int) -> None:
        end = min(end, len(live.request.prompt_ids))
        first, last = start // self._block_tokens, end // self._block_tokens
        if self._has_names and last > first:
            self._coming.update(live.names_of(last, self._block_tokens)[first:])
