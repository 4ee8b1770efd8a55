"""Which vectors a checkpoint's makers mean: what the files of sentence-transformers beside it say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.request import Pooling

MODULES, POOLING = "modules.json", "Pooling"
COMPUTED = ("Transformer", POOLING, "Normalize")
"""Others would change the vectors."""
_POOLING_BY_MODE = {
    "pooling_mode_lasttoken": Pooling.LAST,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
    "mean": Pooling.MEAN,
}


def read_pooling(model_path: str) -> Pooling:
    """Return how hidden states become a vector; of the last token's where nothing is said.

    Raises:
        CheckpointError: the files are broken, or say what is not computed here; `pooling` in the settings passes by.
    """
    folder = Path(model_path)
    if not (folder / MODULES).is_file():
        return Pooling.LAST
    found = Pooling.LAST
    for module in _read(folder / MODULES, list):
        kind = str(module.get("type")).rpartition(".")[2] if isinstance(module, dict) else repr(module)
        if kind not in COMPUTED:
            raise CheckpointError(f"{folder / MODULES}: a {kind} is not computed; those of {', '.join(COMPUTED)} are.")
        if kind == POOLING:
            found = _mode(folder / str(module.get("path")) / "config.json")
    return found


def _mode(path: Path) -> Pooling:
    config = _read(path, dict)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    modes = modes or [str(config.get("pooling_mode"))]
    if len(modes) > 1 or modes[0] not in _POOLING_BY_MODE:
        raise CheckpointError(f"{path}: {' and '.join(modes)} is not computed; lasttoken and mean are.")
    return _POOLING_BY_MODE[modes[0]]


def _read(path: Path, kind: type) -> Any:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: it cannot be read: {error}") from None
    if not isinstance(value, kind):
        raise CheckpointError(f"{path}: it is no JSON {'array' if kind is list else 'object'}")
    return value
