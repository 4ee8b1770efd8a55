"""What a request asks of tokens: that the model has them, that they fit, and that some may be drawn. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from adapters.activation import activation_start
from adapters.identity import AdapterRef
from deployments.generation import GenerationRequest
from engine.errors import RequestError
from engine.request import SamplingParams

MAX_NAMED = 8
"""Tokens that an error names."""
MAX_PROMPT_SCORES = 65_536
"""They come all at once, and with their headers must fit into a stream's unread buffer (1 MiB by default)."""


def answer_room(request: GenerationRequest, num_prompt: int, limit: int, *, field: str) -> int:
    """Return how many tokens the answer may have.

    Args:
        limit: the model's context length in tokens.
        field: the request field that holds the prompt.

    Raises:
        RequestError: the prompt alone, or prompt and answer together, exceed the context; so few tokens are left that
            the answer cannot have as many as it must.
    """
    # The engine computes at least one token; beside an echo alone, it is not shown.
    asked = None if request.max_tokens is None else max(1, request.max_tokens)
    if asked is not None and request.clips_max_tokens:
        if num_prompt >= limit:
            # Coding agents recognize this wording of Anthropic's and compact the conversation.
            raise _too_long(
                f"'{field}': prompt is too long: {num_prompt} tokens > {limit - 1} maximum. This model's maximum "
                f"context length is {limit} tokens, of the prompt and the completion together.",
                field,
            )
        asked = min(asked, limit - num_prompt)
    if num_prompt < limit <= (asked or 1):
        name = request.max_tokens_field
        raise _too_long(
            f"'{name}' is {asked}, but this model's maximum context length is {limit} tokens, of the prompt and "
            "the completion together.",
            name,
        )
    if request.max_tokens == 0 and num_prompt >= limit:
        raise _too_long(
            f"This model's maximum context length is {limit} tokens, and '{field}' has {num_prompt}, which leaves no "
            f"room for the one token that is computed, though not shown, if '{request.max_tokens_field}' is 0.",
            field,
        )
    if num_prompt + (asked or 1) > limit:
        raise _too_long(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{num_prompt + (asked or 1)} tokens ({num_prompt} in '{field}', {asked or 1} in the completion).",
            field,
        )
    room = asked or limit - num_prompt
    if request.params.min_tokens > room:
        raise RequestError.about(
            "min_tokens",
            f"({request.params.min_tokens}) must be at most {room}, the answer's maximum: of this model's maximum "
            f"context length of {limit} tokens, '{field}' has {num_prompt}.",
        )
    return room


def _too_long(message: str, field: str) -> RequestError:
    return RequestError(message, field=field, code="context_length_exceeded")


def check_prompt_scores(request: GenerationRequest, num_prompt_tokens: int) -> None:
    """Check that a request does not ask for too many log-probabilities of its prompt.

    Raises:
        RequestError: it does.
    """
    num_top = request.params.num_prompt_logprobs
    if num_top is None or (num_top + 1) * num_prompt_tokens <= MAX_PROMPT_SCORES:
        return
    field = "logprobs" if request.echoes else "prompt_logprobs"
    raise RequestError.about(
        field,
        f"asks for {num_top + 1} log-probabilities of each of the prompt's {num_prompt_tokens} tokens; at most "
        f"{MAX_PROMPT_SCORES} are returned for one prompt.",
    )


def adapter_start(
    adapter: AdapterRef | None, token_ids: Sequence[int], spelling: Callable[[int], bytes], *, field: str
) -> int:
    """Return the position of the first token of a prompt that an adapter applies to.

    Args:
        spelling: returns the bytes that a token stands for.

    Raises:
        RequestError: nothing in the prompt activates the adapter.
    """
    if adapter is None:
        return 0
    start = activation_start(token_ids, adapter.invocation_ids)
    if start is None:
        text = b"".join(map(spelling, adapter.invocation_ids)).decode("utf-8", "replace")
        raise RequestError.about(
            field,
            f"does not contain {text!r} (token ids {list(adapter.invocation_ids)}), from which on the adapter "
            f"{adapter.name!r} applies; end the prompt with it, or have the chat template do so.",
            code="adapter_not_activated",
        )
    return start


def check_vocabulary(token_ids: Sequence[int], vocab_size: int, *, field: str) -> None:
    """Check that all token ids are within a model's vocabulary.

    Raises:
        RequestError: one is not; names the field and the id.
    """
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise RequestError.about(
            field, f"has the token id {wrong}; those of this model are from 0 to {vocab_size - 1}."
        )


def check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    """Do nothing if the model has all tokens that are named.

    Raises:
        RequestError: it has not.
    """
    named: dict[str, Sequence[int]] = {
        "logit_bias": [token_id for token_id, _ in params.logit_bias],
        "allowed_token_ids": params.allowed_token_ids,
        "stop_token_ids": params.stop_token_ids,
    }
    for field, token_ids in named.items():
        check_vocabulary(token_ids, vocab_size, field=field)


def check_some_are_left(params: SamplingParams, eos_ids: Sequence[int]) -> None:
    """Do nothing if some token may come first, and after any others that may be drawn.

    Args:
        params: with bad words as token ids.
        eos_ids: what ends an answer, unless it is ignored.

    Raises:
        RequestError: the request forbids all that it allows.
    """
    if not params.allowed_token_ids:
        return
    masks = _Masks(params, eos_ids)
    context = masks.dead_end()
    if context is None:
        return
    fields = masks.fields(context)
    others = " and ".join(f"'{field}'" for field in fields)
    place = f" after the tokens {list(context[:MAX_NAMED])}" if context else ""
    raise RequestError.about(
        "allowed_token_ids",
        f"has no token that {others} {'leave' if len(fields) > 1 else 'leaves'}{place}; at least 1 is needed.",
    )


class _Masks:
    """What a request with allowed tokens forbids of them, after which tokens."""

    def __init__(self, params: SamplingParams, eos_ids: Sequence[int]) -> None:
        self._allowed = frozenset(params.allowed_token_ids)
        self._ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self._min_tokens, self._max_tokens = params.min_tokens, params.max_tokens
        # No answer contains any other, nor goes on after an end.
        self._words = [
            word for word in params.bad_words if self._allowed.issuperset(word) and self._ends.isdisjoint(word[:-1])
        ]

    def dead_end(self) -> tuple[int, ...] | None:
        """Return tokens that an answer may begin with and after which none may come, the shortest; None if none are."""
        # Where bad words match, the longest of their beginnings decides: the others are ends of it.
        contexts = sorted({(), *(word[:-1] for word in self._words)}, key=lambda context: (len(context), context))
        for context in contexts:
            if len(context) < self._max_tokens and self._forbidden(context) >= self._allowed and self._is_open(context):
                return context
        return None

    def fields(self, context: tuple[int, ...]) -> list[str]:
        """Return the names of the fields that forbid all after these tokens."""
        names = ["bad_words"] if self._bad(context) else []
        return [*names, "min_tokens"] if len(context) < self._min_tokens else names

    def _is_open(self, context: tuple[int, ...]) -> bool:
        return all(token_id not in self._forbidden(context[:place]) for place, token_id in enumerate(context))

    def _forbidden(self, context: tuple[int, ...]) -> set[int]:
        bad = self._bad(context)
        return bad | self._ends if len(context) < self._min_tokens else bad

    def _bad(self, context: tuple[int, ...]) -> set[int]:
        return {
            word[-1]
            for word in self._words
            if len(word) <= len(context) + 1 and context[len(context) + 1 - len(word) :] == word[:-1]
        }
