"""The work ahead of a new request: live requests as the loads of the forecast. Pure: standard library only.

A request with `ignore_eos` is expected to generate up to its limit. Any other request ahead is expected to generate as
many tokens as its flow's answers have on average. A request that asks for admission is charged its own `max_tokens`,
unless the context ends first. The prefix cache is expected to hold the same share of each prompt as it has held
so far. If several requests have the same prompt, as the choices of one answer do, it is computed once and counts once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import partial

from engine.config import ResolvedConfig
from engine.metrics import SchedulerCounters
from engine.request import Pooling, Request
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.forecast import Backlog, Load
from engine.scheduling.live_request import LiveRequest, flow_of, rank_of
from engine.scheduling.overtaking import passes
from engine.scheduling.row_shares import takes_row
from engine.step import pairs_of

TAIL_TOKENS = 64
"""Compared first: prompts with a long beginning in common mostly differ here."""


class BacklogReader:
    """Reads the scheduler's queues without changing them; any thread may call it while the engine's thread runs."""

    def __init__(self, config: ResolvedConfig, queue: FairQueue, counters: SchedulerCounters) -> None:
        self._config = config
        self._reach = config.reach
        self._queue = queue
        self._counters = counters

    def before(
        self,
        request: Request,
        running: Sequence[LiveRequest],
        waiting: Sequence[LiveRequest],
        unread: Iterable[Request],
    ) -> Backlog:
        """Return the requests served before `request`; `unread` ones have arrived but are not queued yet."""
        # The copy is atomic, whatever the engine's thread does meanwhile.
        running, waiting = tuple(running), tuple(waiting)
        rank = rank_of(request.priority, tag=self._queue.next_tag(flow_of(request)), arrival=1 << 62)
        ahead = sorted((live for live in waiting if live.rank < rank), key=lambda live: live.rank)
        arriving = [other for other in unread if other.priority <= request.priority]
        prompts = _Prompts(self._config)
        # Its own first: what others compute of it is no wait, but its own work.
        prompts.add(request)
        by_rank = sorted(running, key=lambda live: live.rank)
        held = [prompts.once(live.request, self.load(live)) for live in by_rank]
        queued = [prompts.once(live.request, self.load(live)) for live in ahead]
        queued += [prompts.once(other, self._new_load(other, self._expected_output(other))) for other in arriving]
        if request.deadline_s is None and all(load.deadline_s is None for load in (*held, *queued)):
            passed = partial(_passed, num_tokens=len(request.prompt_ids) + len(request.prior_output_ids))
            held, queued = [*map(passed, held)], [*map(passed, queued)]
        asking = (*(live.request for live in waiting), *arriving)
        return Backlog(
            running=tuple(held),
            waiting=tuple(queued),
            takes_row=takes_row(request, running, asking, self._config.max_num_seqs),
        )

    def load(self, live: LiveRequest) -> Load:
        """Return the remaining work of a live request."""
        num_output = len(live.output_ids)
        num_left = max(1, self._expected_output(live.request) - num_output)
        # A request with a row has already claimed its cached prefix.
        share = self._uncached_share if live.row is None else 1.0
        return self._load(live.request, live.num_wanted, share, len(live.request.prompt_ids) + num_output, num_left)

    def asking_load(self, request: Request) -> Load:
        """Return the work of a request that asks for admission."""
        is_open = len(request.prompt_ids) + request.params.max_tokens >= self._config.max_model_len
        return self._new_load(request, self._expected_output(request) if is_open else request.params.max_tokens)

    def _new_load(self, request: Request, num_output: int) -> Load:
        num_known, num_prior = len(request.prompt_ids) + len(request.prior_output_ids), len(request.prior_output_ids)
        return self._load(request, num_known, self._uncached_share, num_known, max(1, num_output - num_prior))

    def _load(self, request: Request, num_wanted: int, share: float, num_known: int, num_left: int) -> Load:
        prompt_tokens = num_wanted * share if num_wanted > 1 else num_wanted
        return Load(
            prompt_tokens=prompt_tokens,
            output_tokens=num_left,
            # One more block per table: the scheduler keeps that many free for each running request.
            num_blocks=self._reach.resting(num_known + num_left) + len(self._reach.windows),
            deadline_s=request.deadline_s,
            num_pairs=pairs_of(num_known - prompt_tokens, num_known) if num_wanted > 1 else 0.0,
        )

    @property
    def _uncached_share(self) -> float:
        return 1 - self._counters.hit_share

    def _expected_output(self, request: Request) -> int:
        limit = min(request.params.max_tokens, self._config.max_model_len - len(request.prompt_ids))
        if request.params.ignore_eos:
            return limit
        return min(limit, max(request.params.min_tokens, round(self._queue.mean_output(flow_of(request)))))


def _passed(load: Load, num_tokens: int) -> Load:
    """Return what of a load comes before a prompt of `num_tokens`: as much as its own if it passes the load's."""
    if not passes(num_tokens, load.prompt_tokens):
        return load
    return load._replace(prompt_tokens=num_tokens, num_pairs=load.num_pairs * num_tokens / load.prompt_tokens)


class _Prompts:
    """The prompts of a backlog, each of which is computed for one of its requests and found by the others."""

    def __init__(self, config: ResolvedConfig) -> None:
        self._is_shared = config.enable_prefix_cache
        self._known: dict[Hashable, tuple[int, ...]] = {}

    def add(self, request: Request) -> bool:
        """Record the prompt of a request; return whether that of an earlier one is the same."""
        needs_all = request.params.num_prompt_logprobs is not None or request.pooling is Pooling.MEAN
        if needs_all or not self._is_shared:
            return False
        ids = request.prompt_ids
        key = request.adapter, request.salt, len(ids), ids[-TAIL_TOKENS:]
        known = self._known.get(key)
        if known is None:
            self._known[key] = ids
        return known == ids

    def once(self, request: Request, load: Load) -> Load:
        """Return the load of a request, without its prompt if that counts already."""
        return load._replace(prompt_tokens=1) if self.add(request) else load
