"""Reads a tokenizer for llguidance, which tells special tokens from text otherwise than tokenizer.json does.

- It takes every added token that is spelt `<...>` for a special one, which no text in a grammar matches. Qwen's models
  could then write neither `</think>` nor `<tool_call>` as the token that they were trained to write.
- It makes special tokens of text that a grammar forces. A constant `<|end|>` then ended the answer, or was an error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLTokenizer, TokenizerWrapper


def read_tokenizer(content: str, vocab_size: int, eos_ids: Sequence[int]) -> LLTokenizer:
    """Return the tokenizer of a tokenizer.json.

    Args:
        vocab_size: of the logits; a larger tokenizer keeps its own size.

    Raises:
        ValueError: the library does not support it.
    """
    ends = list(eos_ids) or None
    try:
        found = LLTokenizer(content, n_vocab=vocab_size, eos_token=ends)
    except ValueError:
        found = LLTokenizer(content, eos_token=ends)
    plain = TokenizerWrapper(_PlainTokenizer(found, json.loads(content).get("added_tokens") or ()))
    return LLTokenizer(plain, n_vocab=found.vocab_size, eos_token=found.eos_tokens)


class _PlainTokenizer:
    """What the library asks of a tokenizer.

    Args:
        added: the added tokens of tokenizer.json.

    Attributes:
        tokens: what each token stands for, by id; of a special token, its spelling.
    """

    def __init__(self, tokenizer: LLTokenizer, added: Sequence[Mapping[str, Any]]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_token
        self.bos_token_id = None
        shown = {token["id"] for token in added if not token["special"]} - set(tokenizer.eos_tokens)
        marks = [token["content"].encode() for token in added if token["special"]]
        ids = range(tokenizer.vocab_size)
        self.tokens = [tokenizer.decode_bytes([token_id]) for token_id in ids]
        # The library's include those that fill up the vocabulary.
        self.special_token_ids = [i for i in ids if tokenizer.is_special_token(i) and i not in shown]
        self._marks = re.compile(b"|".join(map(re.escape, marks)) or rb"(?!)")

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text; if it spells a special token, the longest that fit from left to right."""
        if self._marks.search(text):
            return self._tokenizer.greedy_tokenize(text.decode())
        return self._tokenizer.tokenize_bytes(text)
