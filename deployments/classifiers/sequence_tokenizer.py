"""Texts and pairs of texts to rows of token ids for a classifier, cut to its window and padded as transformers does it.

Whichever way its tokenizer was read, the work is done by the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Encoding

from deployments.tokenizer.tokenizer_folder import load_tokenizer
from engine.errors import CheckpointError

Rows = Mapping[str, list[list[int]]]
"""Unpadded: `input_ids` and what else the model reads."""


class SequenceTokenizer:
    """The tokenizer of one checkpoint; for one thread.

    Raises:
        CheckpointError: the folder has no fast tokenizer, or none that names a padding token.
    """

    def __init__(self, folder: str) -> None:
        self._loaded = load_tokenizer(folder)
        self._backend = self._loaded.backend
        self._backend.no_padding()
        pad_id: int | None = self._backend.token_to_id(self._loaded.special_tokens.get("pad_token", ""))
        if pad_id is None:
            raise CheckpointError(f"{folder}: the tokenizer names no padding token")
        self._padding_by_name = {"input_ids": pad_id, "token_type_ids": self._loaded.pad_type_id, "attention_mask": 0}

    @property
    def max_tokens(self) -> float:
        """How many tokens a row may have, by what the tokenizer says; 10^30 where it says nothing."""
        return self._loaded.max_tokens

    def num_special_in_pair(self) -> int:
        """Return how many tokens a pair has beside those of its texts."""
        count: int = self._backend.num_special_tokens_to_add(True)
        return count

    def windows(self, texts: Sequence[str], max_tokens: int, overlap: int) -> tuple[Rows, list[int]]:
        """Return the rows of texts, each of at most `max_tokens`, and the index of each row's text.

        Those of one text overlap.

        Raises:
            TypeError: a text holds a lone surrogate.
        """
        self._cut_to(max_tokens, overlap)
        found = self._backend.encode_batch(list(texts))
        encodings = [(i, part) for i, whole in enumerate(found) for part in (whole, *whole.overflowing)]
        parts = [self._row(part) for _, part in encodings]
        return {name: [row[name] for row in parts] for name in self._names()}, [i for i, _ in encodings]

    def pair(self, first: str, second: str, max_tokens: int | None) -> dict[str, list[int]]:
        """Return the row of two texts; with `max_tokens` both are cut to so many together, from the longer one.

        Raises:
            TypeError: a text holds a lone surrogate.
        """
        if max_tokens is None:
            self._backend.no_truncation()
        else:
            self._cut_to(max_tokens, 0)
        # An empty text is no second one, for transformers.
        return self._row(self._backend.encode(first, second or None))

    def padded(self, rows: Rows) -> dict[str, torch.Tensor]:
        """Return rows as tensors [rows, tokens] of the longest one."""
        longest = max(map(len, rows["input_ids"]))
        is_left = self._loaded.padding_side == "left"

        def whole(name: str, row: list[int]) -> list[int]:
            padding = [self._padding_by_name[name]] * (longest - len(row))
            return padding + row if is_left else row + padding

        return {name: torch.tensor([whole(name, row) for row in numbers]) for name, numbers in rows.items()}

    def _cut_to(self, max_tokens: int, overlap: int) -> None:
        self._backend.enable_truncation(
            max_tokens, stride=overlap, strategy="longest_first", direction=self._loaded.truncation_side
        )

    def _names(self) -> list[str]:
        return [name for name in self._padding_by_name if name == "input_ids" or name in self._loaded.input_names]

    def _row(self, encoding: Encoding) -> dict[str, list[int]]:
        numbers = {
            "input_ids": encoding.ids,
            "token_type_ids": encoding.type_ids,
            "attention_mask": encoding.attention_mask,
        }
        return {name: numbers[name] for name in self._names()}
