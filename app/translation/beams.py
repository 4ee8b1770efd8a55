"""Check which requests a beam search can answer, and assign each answer its share of the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from app.schemas.common import SamplingFields
from deployments.generation import BeamShare, GenerationRequest
from engine.errors import RequestError
from engine.request import SamplingParams

MAX_BEAMS = 16
_FREE = ("max_tokens", "seed", "temperature", "stop_token_ids", "ignore_eos", "num_logprobs")
"""Parameters allowed with a search: it either applies them, or is deterministic whatever their value."""
_WIRE_NAMES = {
    "dry": "dry_multiplier",
    "lz": "lz_penalty",
    "num_prompt_logprobs": "prompt_logprobs",
}
_PLAIN = SamplingParams(max_tokens=1)


def with_beams(
    body: SamplingFields, generations: Sequence[GenerationRequest], num_answers: int
) -> tuple[GenerationRequest, ...]:
    """Return the requests; with `use_beam_search`, the `num_answers` adjacent requests of one prompt share a search.

    Raises:
        RequestError: another field cannot be combined with beam search, or there are too many beams.
    """
    if not body.use_beam_search:
        if body.length_penalty not in (None, 1):
            raise RequestError.about("length_penalty", "needs 'use_beam_search' to be true.")
        return tuple(generations)
    if body.stream:
        raise RequestError.about("stream", "cannot be used with 'use_beam_search', which has no answer before its end.")
    if num_answers > MAX_BEAMS:
        raise RequestError.about("n", f"must be at most {MAX_BEAMS} with 'use_beam_search'; it is {num_answers}.")
    if getattr(body, "best_of", None) not in (None, body.n or 1):
        raise _conflict("best_of")
    for generation in generations:
        _check(generation)
    length_penalty = 1.0 if body.length_penalty is None else body.length_penalty
    return tuple(
        replace(
            generation,
            beams=BeamShare(
                group=generations[index - index % num_answers].request_id,
                width=num_answers,
                place=index % num_answers,
                length_penalty=length_penalty,
            ),
        )
        for index, generation in enumerate(generations)
    )


def _check(generation: GenerationRequest) -> None:
    if generation.grammar is not None:
        raise _conflict(generation.grammar.field)
    asked = {
        "stop": bool(generation.stop),
        "bad_words": bool(generation.bad_words),
        "tools": generation.tool_use is not None,
        "echo": generation.echoes,
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise _conflict(field)
    for parameter in fields(SamplingParams):
        name = parameter.name
        if name not in _FREE and getattr(generation.params, name) != getattr(_PLAIN, name):
            raise _conflict(_WIRE_NAMES.get(name, name))
    if generation.params.temperature not in (0, 1):
        raise _conflict("temperature")


def _conflict(field: str) -> RequestError:
    return RequestError.about(field, "cannot be used with 'use_beam_search'.")
