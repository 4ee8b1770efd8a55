"""A beam search as a source of tokens: the answers of one request share a search, and each is one of its beams.

A beam is expanded by a call for one token with the log-probabilities of the likeliest ones; all but its last tokens are
in the prefix cache. The tokens of an answer come at once, when the search is over. Until then the i-th likeliest beam
is attributed to the i-th answer: its calls and tokens appear in that answer's timeline, and are its usage if the search
is aborted or the gateway dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import NamedTuple
from weakref import WeakValueDictionary

from deployments.errors import ABORTED, ReplicaLostError
from deployments.gateway.beam_search import Beam, BeamSearch
from deployments.gateway.resumption import Resumption, TokenSource
from deployments.generation import BeamShare
from deployments.generation_calls import GenerationCall, UsageTag, pack_ids
from deployments.waits import side_by_side
from engine.errors import EngineError
from engine.request import Emission, FinishReason, RequestId

OnExpansion = Callable[[RequestId, int], None]


@dataclass(frozen=True, slots=True)
class _Found:
    beams: Sequence[Beam]
    num_cached_tokens: int


class _Asker(NamedTuple):
    """An answer that waits for a search: its usage tag, and the callback for calls made on its behalf."""

    usage: UsageTag | None
    on_expansion: OnExpansion


class SharedSearch:
    """One search shared by all answers that wait for it; canceled when the last of them leaves before its end.

    Attributes:
        askers: all answers that have joined, by place.
    """

    def __init__(self) -> None:
        self.askers: dict[int, _Asker] = {}
        self._task: asyncio.Task[_Found] | None = None
        self._num_waiting = 0

    async def found(self, search: Callable[[], Coroutine[None, None, _Found]]) -> _Found:
        """Wait for the search. The first caller starts it, and a caller after a failure restarts it."""
        if self._task is None or (self._task.done() and (self._task.cancelled() or self._task.exception())):
            self._task = asyncio.create_task(search())
        task = self._task
        self._num_waiting += 1
        try:
            return await asyncio.shield(task)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting and not task.done():
                task.cancel()
                await asyncio.wait([task])


class BeamSource:
    """One answer of a beam search; see `deployments.gateway.resumption.TokenSource`.

    Args:
        searches: this gateway's running searches by group of answers; only the answers hold strong references.
        eos_ids: token ids that end an answer, unless it ignores them.
        on_expansion: called with the id of each call made for the answer, and the tokens of the beam that it expands.
        max_resumes: bounds the replicas that one call may lose.
        on_resume: called before a call is repeated because its replica was lost.
    """

    def __init__(
        self,
        searches: WeakValueDictionary[str, SharedSearch],
        replicas: TokenSource,
        share: BeamShare,
        eos_ids: frozenset[int],
        on_expansion: OnExpansion,
        *,
        max_resumes: int,
        on_resume: Callable[[], None],
    ) -> None:
        self._shared = searches.setdefault(share.group, SharedSearch())
        self._replicas = replicas
        self._share = share
        self._eos_ids = eos_ids
        self._on_expansion = on_expansion
        self._max_resumes = max_resumes
        self._on_resume = on_resume

    async def tokens(self, call: GenerationCall) -> AsyncGenerator[Emission, None]:
        """Yield the whole answer in one batch; raises the errors of the replicas."""
        self._shared.askers[self._share.place] = _Asker(call.usage, self._on_expansion)
        found = await self._shared.found(lambda: self._search(call))
        beam = found.beams[self._share.place]
        yield Emission(
            request_id=call.request_id,
            token_ids=beam.token_ids,
            finish_reason=FinishReason.STOP if beam.token_ids[-1] in self._ends(call) else FinishReason.LENGTH,
            num_cached_tokens=found.num_cached_tokens,
            logprobs=() if call.params.num_logprobs is None else beam.scores,
        )

    def _ends(self, call: GenerationCall) -> frozenset[int]:
        eos_ids = frozenset[int]() if call.params.ignore_eos else self._eos_ids
        return eos_ids.union(call.params.stop_token_ids)

    async def _search(self, call: GenerationCall) -> _Found:
        search = BeamSearch(
            self._share.width,
            max_tokens=call.params.max_tokens,
            length_penalty=self._share.length_penalty,
            ends=self._ends(call),
            num_top=call.params.num_logprobs or 0,
        )
        num_top = max(search.num_expansions, call.params.num_logprobs or 0)
        params = replace(call.params, temperature=0.0, ignore_eos=True, stop_token_ids=(), num_logprobs=num_top)
        num_cached_tokens: int | None = None
        while search.open:
            template = replace(call, params=params)
            batches = await side_by_side(self._expanded(template, *placed) for placed in enumerate(search.open))
            if num_cached_tokens is None:
                num_cached_tokens = batches[0].num_cached_tokens
            search.advance([batch.logprobs[0] for batch in batches])
        if len(search.found) < self._share.width:
            raise EngineError("The vocabulary is too small for so many beams.")
        return _Found(search.found, num_cached_tokens or 0)

    async def _expanded(self, call: GenerationCall, place: int, beam: Beam) -> Emission:
        """Return the next token of a beam, asked for on behalf of the answer at `place`; lost replicas cost only it."""
        askers = self._shared.askers
        asker = askers.get(place) or next(iter(askers.values()))
        expansion = replace(
            call,
            prior_output_ids=pack_ids(beam.token_ids),
            params=replace(call.params, max_tokens=len(beam.token_ids) + 1),
            usage=asker.usage,
        )
        attempts = Resumption(
            self._replicas,
            expansion,
            max_resumes=self._max_resumes,
            on_attempt=lambda request_id: asker.on_expansion(request_id, len(beam.token_ids)),
            on_resume=self._on_resume,
        )
        try:
            async with aclosing(attempts.tokens()) as batches:
                async for batch in batches:
                    if batch.logprobs:
                        return batch
        except ReplicaLostError as error:
            # Whoever waits for the search would repeat all of it.
            raise EngineError(str(error)) from error
        raise EngineError(ABORTED)
