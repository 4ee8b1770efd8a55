"""The strings over which no repeat reaches (DRY), as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.tokenizer.text_codec import TextCodec


def breaker_ids(codec: TextCodec, texts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the sequences of token ids that these strings come as.

    That is every token that has one inside, and those that several tokens spell, as the tokenizer writes them at the
    front of a text and after a space. It may look at the whole vocabulary.
    """
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        found |= dict.fromkeys((token_id,) for token_id in codec.tokens_with(text))
        found |= dict.fromkeys(word for word in codec.encode_word(text) if len(word) > 1)
    return tuple(found)
