"""A request from arrival to end, as the scheduler sees it: a few integers, its blocks and its block names.

    0 <= num_computed <= num_tokens = len(prompt) + len(output)

Tokens before `num_computed` are in the cache, or will be once the steps in flight are done. Preemption sets it to 0 and
keeps the known tokens and block names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from adapters.identity import AdapterDigest
from engine.cache.blocks import BlockId
from engine.cache.prefix_index import BlockName, Lineage
from engine.request import Emission, FinishReason, Pooling, Request, TokenLogprobs
from engine.speculation.drafter import Drafter
from engine.trace import RequestTrace, TraceNotes

PENDING = -1
"""Placeholder for a token that a step in flight will draw."""
BY_RANK = attrgetter("rank")
"""Sort key of live requests, the best rank first."""

MAX_HEAD_START_STEPS = 4096
HALF_HEAD_START_PRIORITY = 8


class Rank(NamedTuple):
    """A request's position in every order that the scheduler uses; lower is served first.

    A request's turn is its start tag (`engine.scheduling.fair_queue`), in virtual steps. A priority is not a class of
    its own but a head start or a handicap: it delays the turn by

        MAX_HEAD_START_STEPS * priority / (|priority| + HALF_HEAD_START_PRIORITY)

    steps, a negative number for a negative priority. The delay stays below MAX_HEAD_START_STEPS either way, so that
    priorities alone never let a request overtake one whose turn is 2 * MAX_HEAD_START_STEPS earlier. A deadline at risk
    gives another head start of MAX_HEAD_START_STEPS (`LiveRequest.hurry`).
    """

    virtual_step: float
    priority: int
    arrival: int


def rank_of(priority: int, *, tag: float, arrival: int) -> Rank:
    """Return the rank of the `arrival`-th request, whose turn is at virtual step `tag`."""
    head_start = MAX_HEAD_START_STEPS * priority / (abs(priority) + HALF_HEAD_START_PRIORITY)
    return Rank(tag + head_start, priority, arrival)


def flow_of(request: Request) -> tuple[str, AdapterDigest | None]:
    """Return the flow whose share of the engine a request uses: its pair of tenant and adapter."""
    return request.tenant, request.adapter


class Drawn(NamedTuple):
    """The tokens that a step drew for a request, with log-probabilities of them and of the prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class LiveRequest:
    """Mutable state of one request; owned by the scheduler.

    Attributes:
        rank: lower is served first and preempted last.
        tag: start tag from the fair queue.
        cost: what its flow was charged for it, in steps.
        is_hurried: whether its deadline was at risk while it waited.
        has_yielded: whether it has yielded its row to another flow.
        output_ids: generated tokens, including `Request.prior_output_ids`; the last ones may be `PENDING`.
        queued_at_s, admitted_at_s, first_token_at_s: monotonic times for the timeline; None until they happen.
        tables: its block tables, one for each table of the cache's layout; empty while it waits.
        row: index in the runner's buffers while the request runs, None while it waits.
        is_guest: whether its row is one of the extra ones for newcomers (`ResolvedConfig.num_guest_rows`).
        num_settled: tokens before it are in the cache; the steps in flight compute the rest of `num_computed`.
        num_cached_tokens: prompt tokens served from the prefix cache at the first admission; None before.
        num_skips: plans that did not admit it only because every adapter slot was taken.
        num_own: tokens that it has to compute, as neither the cache, a tier nor a request before it held them when it
            came, or the cache when the last fetch for it ended.
        names: names of its leading full blocks, computed on demand.
        state_from, num_begun, branch: for layers with states, set at admission: the place of the state to resume from,
            the number of tokens it covers, and the number of tokens whose blocks were in the cache.
        answer_state: name of the last state kept of its answer.
        ticket, num_seeks, next_seek_s: the last fetch of its prefix, the number of fetches since it began to wait, and
            when it may next look for one (`engine.cache.tiers`).
        await_until_s: how long it waits for that fetch.
        next_open_s: when to look again whether there is room for it, while it waits.
        next_look_s: when to look again whether its deadline can be kept, while it waits.
        num_lacking, next_count_s: tokens that were not in the cache when it was last looked up whether it passes others
            (`engine.scheduling.overtaking`), and when to look again.
        notes: notes for its trace.
        prompt_logprobs: log-probabilities of the prompt tokens from the second on, as far as computed.
        drafter: source of draft tokens for its answer; None until first used.
    """

    request: Request
    rank: Rank
    tag: float
    queued_at_s: float
    output_ids: list[int]
    row: int | None = None
    num_own: int = 1 << 62
    cost: float = 0.0
    num_computed: int = 0
    num_settled: int = 0
    num_cached_tokens: int | None = None
    num_skips: int = 0
    num_seeks: int = 0
    next_seek_s: float = 0.0
    await_until_s: float = 0.0
    next_open_s: float = 0.0
    next_look_s: float = 0.0
    num_lacking: int = 0
    next_count_s: float = 0.0
    ticket: int | None = None
    state_from: int | None = None
    num_begun: int = 0
    branch: int = 0
    answer_state: BlockName | None = None
    is_guest: bool = False
    is_hurried: bool = False
    has_yielded: bool = False
    admitted_at_s: float | None = None
    first_token_at_s: float | None = None
    tables: list[list[BlockId]] = field(default_factory=list)
    names: list[BlockName] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    drafter: Drafter | None = None
    notes: TraceNotes = field(default_factory=TraceNotes)

    @property
    def had_turn(self) -> bool:
        """Whether it was ever admitted."""
        return self.num_cached_tokens is not None

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.request.prompt_ids) + len(self.output_ids)

    @property
    def num_wanted(self) -> int:
        """Known tokens still to be computed."""
        return len(self.request.prompt_ids) + len(self.output_ids) - self.num_computed

    @property
    def num_left(self) -> int:
        """Known tokens that it is expected to compute itself."""
        return self.num_wanted if self.row is not None else min(self.num_wanted, self.num_own)

    @property
    def is_decoding(self) -> bool:
        """Whether it computes output, several tokens if a grammar forced some; one last prompt token counts too."""
        return self.num_computed >= len(self.request.prompt_ids) or self.num_wanted == 1

    @property
    def is_begun(self) -> bool:
        """Whether it has a row and some of its prompt in the cache, nothing of it in a step in flight, and no token."""
        is_prompt = self.row is not None and self.first_token_at_s is None and not self.is_decoding
        return is_prompt and self.num_settled == self.num_computed

    @property
    def wants_scores(self) -> bool:
        """Whether requested log-probabilities of prompt tokens are still missing."""
        wanted = self.request.params.num_prompt_logprobs is not None
        return wanted and len(self.prompt_logprobs) < len(self.request.prompt_ids) - 1

    @property
    def needs_every_token(self) -> bool:
        """Whether cached tokens must be recomputed: the request needs outputs that the cache does not hold."""
        return self.wants_scores or self.request.pooling is Pooling.MEAN

    def names_of(self, num_blocks: int, block_tokens: int) -> list[BlockName]:
        """Return the names of the first `num_blocks` blocks, all of which must be full of known tokens."""
        return extended_names(self.names, self.request, self.output_ids, num_blocks, block_tokens)[:num_blocks]

    def trace(self, reason: FinishReason, now_s: float, now_unix_s: float) -> RequestTrace:
        """Return the trace of the request, which ends now."""
        self.notes.end_preemption(now_s, self.queued_at_s)

        def since(at_s: float | None) -> float | None:
            return None if at_s is None else at_s - self.queued_at_s

        return RequestTrace(
            queued_unix_s=now_unix_s - (now_s - self.queued_at_s),
            admitted_s=since(self.admitted_at_s),
            first_token_s=since(self.first_token_at_s),
            end_s=now_s - self.queued_at_s,
            chunks=tuple(self.notes.chunks),
            num_prompt_tokens=len(self.request.prompt_ids),
            num_cached_tokens=self.num_cached_tokens or 0,
            num_output_tokens=len(self.output_ids),
            preemptions=tuple(self.notes.preemptions),
            num_preemptions=self.notes.num_preemptions,
            device_s=self.notes.device_s,
            reason=reason.value,
        )

    def is_full(self, max_model_len: int) -> bool:
        """Return whether the request ends with its newest token, whichever it turns out to be."""
        if self.request.pooling is not None:
            return not self.num_wanted
        return len(self.output_ids) >= self.request.params.max_tokens or self.num_tokens >= max_model_len

    def begin_turn(self, now_s: float) -> bool:
        """Record an admission, once `num_computed` tells what was cached; return whether it is the first."""
        if self.had_turn:
            self.notes.end_preemption(now_s, self.queued_at_s)
            return False
        self.num_cached_tokens = min(self.num_computed, len(self.request.prompt_ids))
        self.admitted_at_s = now_s
        return True

    def hurry(self) -> None:
        """Give the request a head start because its deadline is at risk."""
        self.is_hurried = True
        self.rank = self.rank._replace(virtual_step=self.rank.virtual_step - MAX_HEAD_START_STEPS)

    def emission(
        self,
        drawn: Drawn | None,
        *,
        reason: FinishReason | None = None,
        pooled: bytes | None = None,
        error: str | None = None,
    ) -> Emission:
        """Return an emission with new tokens, the end of the request, or both."""
        return Emission(
            request_id=self.request.request_id,
            token_ids=() if drawn is None else drawn.token_ids,
            finish_reason=reason,
            num_cached_tokens=self.num_cached_tokens or 0,
            num_accepted=0 if self.drafter is None else self.drafter.num_accepted,
            num_rejected=0 if self.drafter is None else self.drafter.num_rejected,
            logprobs=() if drawn is None else drawn.logprobs,
            prompt_logprobs=() if drawn is None else drawn.prompt_logprobs,
            pooled=pooled,
            error=error,
        )

    def drop_pending(self) -> None:
        """Drop the placeholders of tokens that are still to be drawn."""
        while self.output_ids and self.output_ids[-1] == PENDING:
            self.output_ids.pop()

    def put(
        self, index: int, token_ids: Sequence[int], eos_ids: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        """Write tokens at `index` and after it, up to one that ends the request; return the reason, or None."""
        for place, token_id in enumerate(token_ids, index):
            if place < len(self.output_ids):
                self.output_ids[place] = token_id
            else:
                self.output_ids.append(token_id)
            reason = self.finish_after(place, eos_ids, max_model_len)
            if reason is not None:
                return reason
        return None

    def finish_after(self, index: int, eos_ids: frozenset[int], max_model_len: int) -> FinishReason | None:
        """Return why the request ends with the output token at `index`, or None."""
        params, token_id, num_output = self.request.params, self.output_ids[index], index + 1
        is_stop = token_id in params.stop_token_ids or (token_id in eos_ids and not params.ignore_eos)
        if is_stop and num_output >= params.min_tokens:
            return FinishReason.STOP
        if num_output >= params.max_tokens or len(self.request.prompt_ids) + num_output >= max_model_len:
            return FinishReason.LENGTH
        return None


def extended_names(
    names: list[BlockName], request: Request, output_ids: Sequence[int], num_blocks: int, block_tokens: int
) -> list[BlockName]:
    """Extend the names of a request's leading blocks to so many, which must be full of known tokens; return them."""
    prompt = request.prompt_ids
    lineage = Lineage(request.adapter, request.salt, request.adapter_start)
    parent = names[-1] if names else None
    while len(names) < num_blocks:
        start = len(names) * block_tokens
        end = start + block_tokens
        ids = [*prompt[start:end], *output_ids[max(0, start - len(prompt)) : max(0, end - len(prompt))]]
        parent = lineage.next_name(parent, start, ids)
        names.append(parent)
    return names
