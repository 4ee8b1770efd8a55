"""Each request alone, without a cache, a batch or a budget: what its answer is, whatever the engine does on the way."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from engine.request import FinishReason, Pooling, Request

VOCAB_SIZE = 24
EOS_IDS = frozenset({0})


def cell(request: Request, position: int, previous: int, token_id: int) -> int:
    """What the cache holds at a position: it depends on everything up to it, on the adapter there and on the salt."""
    adapter = request.adapter if position >= request.adapter_start else None
    return _number(adapter, request.salt, previous, token_id)


def next_token(request: Request, cells: Iterable[int]) -> int:
    """The token after those whose cells are given; reads all of them, as attention does."""
    token_id = _number(request.params.seed, *cells) % VOCAB_SIZE
    if request.params.ignore_eos and token_id in EOS_IDS:
        return VOCAB_SIZE - 1
    return token_id


def forced_token(request: Request, index: int) -> int | None:
    """The output token that a request's grammar leaves no choice of at this place; None where it leaves one."""
    if request.params.grammar is None or _number(request.params.grammar, index // 3) % 2:
        return None
    return _number(request.params.grammar, index) % VOCAB_SIZE


def forced_after(request: Request, index: int) -> list[int]:
    """All output tokens from this place on up to where there is a choice."""
    token_ids = []
    while (token_id := forced_token(request, index + len(token_ids))) is not None:
        token_ids.append(token_id)
    return token_ids


def prompt_scores(request: Request) -> list[int]:
    """What is told of each token of the prompt but the first: here, of the cells before them."""
    cells, previous = [], 0
    known = request.prompt_ids[:-1] if request.params.num_prompt_logprobs is not None else ()
    for position, token_id in enumerate(known):
        previous = cell(request, position, previous, token_id)
        cells.append(previous)
    return cells


def vector(request: Request, cells: Iterable[int]) -> bytes:
    """What a request for a vector gets, given the cells of all its tokens."""
    known = list(cells)
    return str(sum(known) if request.pooling is Pooling.MEAN else known[-1]).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: tuple[int, ...]
    reason: FinishReason
    pooled: bytes | None = None


def answer_alone(request: Request, max_model_len: int) -> Answer:
    """Generate token by token, recomputing everything for each."""
    params = request.params
    output = list(request.prior_output_ids)
    while True:
        known = [*request.prompt_ids, *output]
        cells, previous = [], 0
        for position, token_id in enumerate(known):
            previous = cell(request, position, previous, token_id)
            cells.append(previous)
        if request.pooling is not None:
            return Answer((), FinishReason.STOP, vector(request, cells))
        forced = forced_token(request, len(output))
        token_id = next_token(request, cells) if forced is None else forced
        output.append(token_id)
        reason = None
        if len(output) >= params.max_tokens or len(known) + 1 >= max_model_len:
            reason = FinishReason.LENGTH
        is_stop = token_id in params.stop_token_ids or (token_id in EOS_IDS and not params.ignore_eos)
        if is_stop and len(output) >= params.min_tokens:
            reason = FinishReason.STOP
        if reason is not None:
            return Answer(tuple(output[len(request.prior_output_ids) :]), reason)


def _number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=6).digest(), "little")
