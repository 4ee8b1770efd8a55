"""Reads the window and the number of labels of a sequence-classification checkpoint. Does not need torch."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

from engine.decoder.json_file import read_json

OFFSET_POSITION_TYPES = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer"})
"""Model types whose position ids begin after the padding token's id."""
DEFAULT_WINDOW_TOKENS = 512
DEFAULT_NUM_LABELS = 2
"""transformers' default for a config.json without labels."""
MAX_TOKENIZER_CONFIG_BYTES = 16 << 20
"""Larger than for other files, as tokenizer_config.json may list thousands of tokens."""


def window_of(model_type: str, positions: int | None, pad_id: int | None, tokenizer_bound: float) -> int:
    """Return the maximum tokens per row, given a model's positions and its tokenizer's bound."""
    bound = positions or DEFAULT_WINDOW_TOKENS
    if model_type in OFFSET_POSITION_TYPES:
        bound -= (pad_id or 0) + 1
    # A tokenizer without a bound has 10^30.
    return int(min(bound, tokenizer_bound))


def read_window(folder: str) -> int:
    """Return the window of a checkpoint from its files alone.

    Raises:
        CheckpointError: the folder has no readable config.json, or its tokenizer_config.json cannot be read.
    """
    config: dict[str, Any] = read_json(Path(folder) / "config.json")
    tokenizer_config = Path(folder) / "tokenizer_config.json"
    told: dict[str, Any] = {}
    if tokenizer_config.exists():
        told = read_json(tokenizer_config, max_bytes=MAX_TOKENIZER_CONFIG_BYTES)
    return window_of(
        str(config.get("model_type")),
        config.get("max_position_embeddings"),
        config.get("pad_token_id"),
        told.get("model_max_length") or inf,
    )


def read_num_labels(folder: str) -> int:
    """Return the number of labels of a checkpoint. Errors as in `read_window`."""
    config: dict[str, Any] = read_json(Path(folder) / "config.json")
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or DEFAULT_NUM_LABELS)
