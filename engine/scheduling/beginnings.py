"""Decides which waiting prompts begin in a step beside the prompts that it computes already. Pure: no torch.

Every request of a step gets its token when the step ends. A prompt that begins in a later step instead

- finds blocks in the cache that this step, or one in flight, computes for a request with the same prefix, and
- does not delay the first tokens of the prompts that this step completes,

at the cost of another step's fixed time.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.cache.prefix_index import BlockName
from engine.config import ResolvedConfig
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.live_request import LiveRequest
from engine.scheduling.step_costs import StepCosts
from engine.step import pairs_of

MIN_GAIN = 2.0
"""Smallest gain in relation to the cost: short prompts take longer than their share of a long one."""

MIN_TOKENS = 64
"""Prompt tokens of a step to which others are always added: it would hardly end sooner without them."""


class Beginnings:
    """The prompts of one step, and whether others had better begin later. Never holds up the first prompt of a step.

    Args:
        running: requests with a row; steps in flight may compute prompts of them.
        has_streams: whether the step also decodes. Then it never ends early: more steps take throughput from everyone.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        costs: StepCosts,
        running: Iterable[LiveRequest],
        tables: BlockTables,
        *,
        has_streams: bool,
    ) -> None:
        self._costs = costs
        self._tables = tables
        self._has_streams = has_streams
        self._block_tokens = config.block_tokens
        # Blocks of layers with states cannot be reused without a state, which is kept for few of them.
        self._has_names = config.enable_prefix_cache and not config.num_snapshots
        self._coming: set[BlockName] = set()
        # Others may compute what the cache holds: for their scores, or because they began before it was fetched.
        self._are_some_held = False
        self._num_tokens = self._num_completed = 0
        self._unread = running

    def note(self, live: LiveRequest, end: int) -> None:
        """Record that the step computes a request's tokens up to `end`."""
        self._expect(live, live.num_computed, end)
        self._num_tokens += end - live.num_computed
        self._num_completed += end == live.num_tokens and live.first_token_at_s is None and not live.request.pooling

    def finds_more_later(self, live: LiveRequest) -> bool:
        """Whether it is worth waiting for blocks of others that the cache does not hold yet."""
        # Only now: most steps have running requests, but none that waits.
        for other in self._unread:
            self._expect(other, other.num_settled, other.num_computed)
        self._unread = ()
        names = self._tables.shareable(live) if self._coming else []
        if self._coming.isdisjoint(names):
            return False
        start = self._tables.num_found(names) if self._are_some_held else 0
        num_tokens = len(self._coming.intersection(names[start:])) * self._block_tokens
        return self._costs.prompt_s(num_tokens, pairs_of(0, num_tokens)) > MIN_GAIN * self._costs.fixed_s

    def delays_others(self, live: LiveRequest, num_left: int) -> bool:
        """Whether first tokens come earlier on average without a waiting prompt in this step.

        Args:
            num_left: prompts that are not in this step yet: all of them would wait for another fixed cost.
        """
        # The lookup of a long prompt takes milliseconds, and admission repeats it.
        if self._has_streams or not self._num_completed or self._num_tokens < MIN_TOKENS:
            return False
        num_tokens = self._tables.num_to_compute(live)
        pairs = pairs_of(live.num_tokens - num_tokens, live.num_tokens)
        gain_s = self._num_completed * self._costs.prompt_s(num_tokens, pairs)
        return gain_s > MIN_GAIN * num_left * self._costs.fixed_s

    def _expect(self, live: LiveRequest, start: int, end: int) -> None:
        end = min(end, len(live.request.prompt_ids))
        first, last = start // self._block_tokens, end // self._block_tokens
        if self._has_names and last > first:
            names = live.names_of(last, self._block_tokens)[first:]
            self._coming.update(names)
            self._are_some_held = self._are_some_held or any(map(self._tables.holds, names))
