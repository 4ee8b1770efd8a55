"""What a request says of single tokens: that the model has them, and that some may be drawn. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.gateway.served_model import check_vocabulary
from engine.errors import RequestError
from engine.request import SamplingParams

MAX_NAMED = 8
"""Tokens that an error names."""


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
    raise RequestError(
        f"'allowed_token_ids' has no token that {others} {'leave' if len(fields) > 1 else 'leaves'}{place}; at least 1 "
        "is needed.",
        field="allowed_token_ids",
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
