"""How many tokens a sequence-classification checkpoint reads at once, and its labels' number. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError

OFFSET_POSITION_TYPES = frozenset({"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "longformer"})
"""Model types whose positions begin after the padding token's."""
DEFAULT_WINDOW_TOKENS = 512
DEFAULT_NUM_LABELS = 2
"""What a config.json that says nothing of labels means to transformers."""


def window_of(model_type: str, positions: int | None, pad_id: int | None, tokenizer_bound: float) -> int:
    """Return the window that a model's positions and its tokenizer leave."""
    bound = positions or DEFAULT_WINDOW_TOKENS
    if model_type in OFFSET_POSITION_TYPES:
        bound -= (pad_id or 0) + 1
    # A tokenizer that knows no bound says 10^30.
    return int(min(bound, tokenizer_bound))


def read_window(folder: str) -> int:
    """Return the window of a checkpoint by its files alone.

    Raises:
        CheckpointError: the folder has no config.json that can be read.
    """
    config = _read(Path(folder) / "config.json")
    bound = float("inf")
    if (Path(folder) / "tokenizer_config.json").exists():
        bound = _read(Path(folder) / "tokenizer_config.json").get("model_max_length") or bound
    return window_of(
        str(config.get("model_type")), config.get("max_position_embeddings"), config.get("pad_token_id"), bound
    )


def read_num_labels(folder: str) -> int:
    """Return how many labels a checkpoint tells apart; errors as `read_window`."""
    config = _read(Path(folder) / "config.json")
    return len(config.get("id2label") or ()) or int(config.get("num_labels") or DEFAULT_NUM_LABELS)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path.parent}: {path.name} is no JSON object")
    return found
