"""What a request says of single tokens: that the model has them, and that some may be drawn. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.gateway.served_model import check_vocabulary
from engine.errors import RequestError
from engine.request import SamplingParams


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
    """Do nothing if some token may come first; a bad word of several tokens forbids none of them.

    Args:
        params: with bad words as token ids.
        eos_ids: what ends an answer, unless it is ignored.

    Raises:
        RequestError: the request forbids all that it allows.
    """
    if not params.allowed_token_ids:
        return
    forbidden = {word[0] for word in params.bad_words if len(word) == 1}
    fields = ["bad_words"] if forbidden else []
    if params.min_tokens:
        forbidden |= {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        fields.append("min_tokens")
    if forbidden.issuperset(params.allowed_token_ids):
        others = " and ".join(f"'{field}'" for field in fields)
        raise RequestError(
            f"'allowed_token_ids' has no token that {others} {'leave' if len(fields) > 1 else 'leaves'}; at least 1 is "
            "needed.",
            field="allowed_token_ids",
        )
