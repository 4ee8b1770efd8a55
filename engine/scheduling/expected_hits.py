"""Foresees what a prompt will find in the cache: what it or a tier holds, and what the prompts before will leave there.

An estimate: until its turn a block may be evicted, or the request end that would have computed it. Pure.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.cache.prefix_index import BlockName
from engine.config import ResolvedConfig
from engine.request import Pooling, Request, RequestId
from engine.scheduling.live_request import extended_names


class Outlook(NamedTuple):
    """What a request finds of its tokens.

    Attributes:
        names: of its full blocks, which others may share.
        reuses: whether it shares those of others.
        num_missing: tokens that the cache does not hold now. Those of a tier count by the time of a fetch.
        num_own: tokens that it will have to compute itself, as no request before it does.
    """

    names: Sequence[BlockName]
    reuses: bool
    num_missing: int
    num_own: int


class ExpectedHits:
    """The outlooks of live requests; any thread may use it.

    Args:
        num_had: returns how many leading blocks of a chain need not be computed now.
    """

    def __init__(self, config: ResolvedConfig, num_had: Callable[[Sequence[BlockName]], int]) -> None:
        self._block_tokens = config.block_tokens
        self._is_on = config.enable_prefix_cache
        # Blocks of layers with states cannot be reused without a state, which is kept for few of them.
        self._counts_coming = not config.num_snapshots
        self._num_had = num_had
        self._lock = threading.Lock()
        self._coming = Counter[BlockName]()
        self._outlooks: dict[RequestId, tuple[Request, Outlook]] = {}

    def look(self, request: Request) -> Outlook:
        """Return the outlook of a request that is added after all others."""
        known = self._outlooks.get(request.request_id)
        # Names must be those of its own tokens, whoever has had its id.
        if known is not None and known[0] is request:
            return known[1]
        num_tokens = request.num_given
        if not self._is_on:
            return Outlook((), False, num_tokens, num_tokens)
        names = extended_names(
            [], request, request.prior_output_ids, num_tokens // self._block_tokens, self._block_tokens
        )
        if request.params.num_prompt_logprobs is not None or request.pooling is Pooling.MEAN:
            return Outlook(names, False, num_tokens, num_tokens)
        # The last token is always computed: the next one is drawn from its logits.
        shareable = names[: (num_tokens - 1) // self._block_tokens]
        num_held = num_shared = self._num_had(shareable)
        while self._counts_coming and num_shared < len(shareable) and shareable[num_shared] in self._coming:
            num_shared += 1
        return Outlook(
            names, True, num_tokens - num_held * self._block_tokens, num_tokens - num_shared * self._block_tokens
        )

    def add(self, request: Request, outlook: Outlook) -> None:
        """Count on what a request will compute, unless it is added already."""
        with self._lock:
            if request.request_id not in self._outlooks:
                self._outlooks[request.request_id] = request, outlook
                self._coming.update(outlook.names)

    def end(self, request_id: RequestId) -> None:
        """Count no longer on a request that has ended; what it computed is in the cache."""
        with self._lock:
            _, outlook = self._outlooks.pop(request_id, (None, None))
            for name in () if outlook is None else outlook.names:
                self._coming[name] -= 1
                if not self._coming[name]:
                    del self._coming[name]

    def num_common(self, names: Sequence[BlockName], others: Sequence[BlockName], start: int) -> int:
        """Return how many tokens from `start` on two requests have in common and share, given their blocks' names."""
        first, last = start // self._block_tokens, min(len(names), len(others))
        # Of most pairs these differ; a name stands for all blocks up to its own.
        if not self._counts_coming or first >= last or names[first] != others[first]:
            return 0
        num_blocks = bisect_left(range(first, last), True, key=lambda block: names[block] != others[block])
        return (first + num_blocks) * self._block_tokens - start
