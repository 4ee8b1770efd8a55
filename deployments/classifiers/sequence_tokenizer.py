"""Encodes texts and text pairs as rows of token ids for a classifier, truncated and padded as in transformers.

However the tokenizer was loaded, the `tokenizers` library does the work.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from tokenizers import Encoding

from deployments.tokenizer.tokenizer_folder import load_tokenizer
from engine.errors import CheckpointError

Row = Mapping[str, list[int]]
"""An unpadded row by input name: `input_ids` and any other inputs of the model."""


class SequenceTokenizer:
    """The tokenizer of one checkpoint; for one thread.

    Raises:
        CheckpointError: the folder has no fast tokenizer, or its tokenizer has no padding token.
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
        """The tokenizer's maximum number of tokens per row, 10^30 if unspecified."""
        return self._loaded.max_tokens

    def num_special_in_pair(self) -> int:
        """Return the number of special tokens added to a pair."""
        count: int = self._backend.num_special_tokens_to_add(True)
        return count

    def windows(self, texts: Sequence[str], max_tokens: int, overlap: int) -> tuple[list[Row], list[int]]:
        """Return rows of at most `max_tokens` that cover the texts, and the index of each row's text.

        Consecutive rows of one text overlap by `overlap` tokens.

        Raises:
            TypeError: a text contains a lone surrogate.
        """
        self._cut_to(max_tokens, overlap)
        found = self._backend.encode_batch(list(texts))
        parts = [(self._row(part), i) for i, whole in enumerate(found) for part in (whole, *whole.overflowing)]
        return [row for row, _ in parts], [i for _, i in parts]

    def pair(self, first: str, second: str, max_tokens: int | None) -> Row:
        """Return the row of two texts, truncated to `max_tokens` in total if given, taking from the longer text first.

        Raises:
            TypeError: a text contains a lone surrogate.
        """
        if max_tokens is None:
            self._backend.no_truncation()
        else:
            self._cut_to(max_tokens, 0)
        # As in transformers, an empty second text counts as absent.
        return self._row(self._backend.encode(first, second or None))

    def padded(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Return the rows as tensors [rows, tokens], padded to the longest row.

        Always on the right, whatever side the tokenizer names: on the left, padding would shift the positions of
        tokens and take the place of the first one, which encoders classify by.
        """
        longest = max(len(row["input_ids"]) for row in rows)
        return {
            name: torch.tensor([row[name] + [padding] * (longest - len(row[name])) for row in rows])
            for name, padding in self._padding_by_name.items()
            if name in rows[0]
        }

    def _cut_to(self, max_tokens: int, overlap: int) -> None:
        self._backend.enable_truncation(
            max_tokens, stride=overlap, strategy="longest_first", direction=self._loaded.truncation_side
        )

    def _row(self, encoding: Encoding) -> Row:
        others = {"token_type_ids": encoding.type_ids, "attention_mask": encoding.attention_mask}
        return {"input_ids": encoding.ids} | {name: others[name] for name in others if name in self._loaded.input_names}
