"""What is read of a tokenizer's folder, by whichever way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer and what its folder says of its use.

    Attributes:
        backend: belongs to whoever loaded it, and may be changed.
        templates: chat template by name ("default", "tool_use").
        special_tokens: text by name ("bos_token").
        max_tokens: 10^30 where nothing is said.
        padding_side, truncation_side: "left" or "right".
        pad_type_id: type of padding tokens.
        input_names: what the model reads of an encoded text.
    """

    backend: Tokenizer
    templates: Mapping[str, str]
    special_tokens: Mapping[str, str]
    max_tokens: float
    padding_side: str
    truncation_side: str
    pad_type_id: int
    input_names: tuple[str, ...]
