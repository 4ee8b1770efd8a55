"""Reads a decoder's geometry from config.json, for the engine's own decoder or the transformers fallback."""

from __future__ import annotations

from pathlib import Path

from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import UnknownArchitectureError, read_spec


def read_model_spec(model_path: str) -> ModelSpec:
    """Read a checkpoint's config.json, with transformers if its architecture is not in `FAMILIES`.

    Raises:
        CheckpointError: as `read_spec`, or transformers does not support it either.
    """
    try:
        return read_spec(model_path)
    except UnknownArchitectureError as unknown:
        # Takes seconds to import.
        from engine.fallback.reading import read_fallback_spec

        return read_fallback_spec(Path(model_path), unknown.fields, unknown.architecture)
