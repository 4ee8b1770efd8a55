"""What a folder's config.json says of its decoder: one of ours, or one that transformers computes."""

from __future__ import annotations

from pathlib import Path

from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import UnknownArchitectureError, read_spec


def read_model_spec(model_path: str) -> ModelSpec:
    """Read a checkpoint's config.json, by transformers where none of our families has its architecture.

    Raises:
        CheckpointError: as `read_spec`, or neither can compute it.
    """
    try:
        return read_spec(model_path)
    except UnknownArchitectureError as unknown:
        # Takes seconds to import.
        from engine.fallback.reading import read_fallback_spec

        return read_fallback_spec(Path(model_path), unknown.fields, unknown.architecture)
