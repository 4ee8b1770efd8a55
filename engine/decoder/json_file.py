"""Reads the JSON files of a checkpoint, which are untrusted input."""

from __future__ import annotations

import json
from pathlib import Path

from engine.errors import CheckpointError

MAX_CONFIG_BYTES = 16 << 20
"""tokenizer_config.json may list thousands of tokens; that of Gemma 3 has 1.16 MB."""


def read_json(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, object]:
    """Return the JSON object in a file.

    Raises:
        CheckpointError: as `read_value`, or the value is not an object.
    """
    value = read_value(path, max_bytes=max_bytes)
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object.")
    return value


def read_value(path: Path, *, max_bytes: int = MAX_CONFIG_BYTES) -> object:
    """Return the JSON value in a file.

    Raises:
        CheckpointError: the file is unreadable, larger than `max_bytes`, or not JSON.
    """
    try:
        if path.stat().st_size > max_bytes:
            raise CheckpointError(f"{path}: larger than {max_bytes} bytes.")
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}.") from None
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error}).") from None
    return value
