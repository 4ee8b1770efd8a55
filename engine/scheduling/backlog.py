"""The work ahead of a new request: live requests as the loads of the forecast. Pure: standard library only.

A request with `ignore_eos` is expected to generate up to its limit. Any other request ahead is expected to generate as
many tokens as its flow's answers have on average. A request that asks for admission is charged its own `max_tokens`,
unless the context ends first. Of a prompt that waits, only what neither the cache nor a prompt before it holds counts
(`engine.scheduling.expected_hits`); and what it has in common with the asking request is no wait of that one, but work
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial

from engine.cache.prefix_index import BlockName
from engine.config import ResolvedConfig
from engine.request import Request
from engine.scheduling.expected_hits import ExpectedHits, Outlook
from engine.scheduling.fair_queue import FairQueue
from engine.scheduling.forecast import Backlog, Load
from engine.scheduling.live_request import LiveRequest, flow_of, rank_of
from engine.scheduling.overtaking import passes
from engine.scheduling.row_shares import takes_row
from engine.step import pairs_of


class BacklogReader:
    """Reads the scheduler's queues without changing them; any thread may call it while the engine's thread runs.

    Args:
        running, waiting: the live requests with and without a row.
    """

    def __init__(
        self,
        config: ResolvedConfig,
        queue: FairQueue,
        hits: ExpectedHits,
        running: Sequence[LiveRequest],
        waiting: Sequence[LiveRequest],
    ) -> None:
        self._config = config
        self._reach = config.reach
        self._queue = queue
        self._hits = hits
        self._running, self._waiting = running, waiting

    @property
    def num_running(self) -> int:
        """Requests with a row."""
        return len(self._running)

    def unread_tokens(self, unread: Iterable[Request]) -> int:
        """Return the prompt tokens left to compute, approximately; `unread` as for `before`."""
        live = [*self._running, *self._waiting]
        num_left = sum(one.num_left for one in live if one.row is None or one.num_wanted > 1)
        return num_left + sum(self._hits.look(request).num_own for request in unread)

    def before(
        self,
        request: Request,
        outlook: Outlook,
        unread: Iterable[Request],
        is_at_risk: Callable[[LiveRequest], bool],
    ) -> Backlog:
        """Return the requests served before `request`.

        Args:
            unread: requests that have arrived but are not queued yet.
            is_at_risk: as for `engine.scheduling.overtaking.in_turn`.
        """
        # The copy is atomic, whatever the engine's thread does meanwhile.
        running, waiting = tuple(self._running), tuple(self._waiting)
        rank = rank_of(request.priority, tag=self._queue.next_tag(flow_of(request)), arrival=1 << 62)
        ahead = sorted((live for live in waiting if live.rank < rank), key=lambda live: live.rank)
        arriving = [other for other in unread if other.priority <= request.priority]
        by_rank = sorted(running, key=lambda live: live.rank)
        held = [self._apart(outlook, live.names, live.num_tokens, self.load(live)) for live in by_rank]
        queued = [self._apart(outlook, live.names, live.num_tokens, self.load(live)) for live in ahead]
        for other in arriving:
            found = self._hits.look(other)
            load = self._new_load(other, found.num_own, self._expected_output(other))
            queued.append(self._apart(outlook, found.names, other.num_given, load))
        hurries = any(other.deadline_s is not None for other in (request, *arriving))
        if not hurries and not any(map(is_at_risk, (*running, *ahead))):
            passed = partial(_passed, num_tokens=outlook.num_own)
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
        return self._load(live.request, live.num_left, live.num_tokens, num_left)

    def asking_load(self, request: Request, outlook: Outlook) -> Load:
        """Return the work of a request that asks for admission; what it shares with others before it is its own."""
        is_open = len(request.prompt_ids) + request.params.max_tokens >= self._config.max_model_len
        num_output = self._expected_output(request) if is_open else request.params.max_tokens
        return self._new_load(request, outlook.num_missing, num_output)

    def _new_load(self, request: Request, prompt_tokens: int, num_output: int) -> Load:
        return self._load(request, prompt_tokens, request.num_given, max(1, num_output - len(request.prior_output_ids)))

    def _load(self, request: Request, prompt_tokens: int, num_known: int, num_left: int) -> Load:
        return Load(
            prompt_tokens=prompt_tokens,
            output_tokens=num_left,
            # One more block per table: the scheduler keeps that many free for each running request.
            num_blocks=self._reach.resting(num_known + num_left) + len(self._reach.windows),
            deadline_s=request.deadline_s,
            num_pairs=pairs_of(num_known - prompt_tokens, num_known) if prompt_tokens > 1 else 0.0,
        )

    def _apart(self, asking: Outlook, names: Sequence[BlockName], num_known: int, load: Load) -> Load:
        """Return a load without what the asking request shares of it."""
        if not asking.reuses:
            return load
        num_shared = self._hits.num_common(asking.names, names, num_known - int(load.prompt_tokens))
        if not num_shared:
            return load
        left = max(1, load.prompt_tokens - num_shared)
        return load._replace(prompt_tokens=left, num_pairs=pairs_of(num_known - left, num_known) if left > 1 else 0.0)

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
