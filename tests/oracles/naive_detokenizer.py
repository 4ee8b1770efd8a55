"""The definition of an incremental decode: decode everything again at every token, and trust nothing but the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def naive_text(decode: Callable[[Sequence[int]], str], token_ids: Sequence[int]) -> str:
    """Return the text of all tokens."""
    return decode(list(token_ids))


def naive_certain(
    decode: Callable[[Sequence[int]], str], token_ids: Sequence[int], continuations: Sequence[Sequence[int]]
) -> str:
    """Return the longest beginning of the text that none of these continuations changes."""
    certain = decode(list(token_ids))
    for continuation in continuations:
        longer = decode([*token_ids, *continuation])
        length = 0
        while length < min(len(certain), len(longer)) and certain[length] == longer[length]:
            length += 1
        certain = certain[:length]
    return certain
