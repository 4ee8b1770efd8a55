"""Reads a decoder's geometry from config.json, for the engine's own decoder or the transformers fallback."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.decoder.model_spec import ModelSpec
from engine.decoder.reading import UnknownArchitectureError, read_spec
from engine.decoder.spec import DecoderSpec
from engine.loading.contents import opened
from engine.loading.names import EMBEDDING, HEAD


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


def read_checkpoint_spec(model_path: str) -> ModelSpec:
    """Return `read_model_spec`'s result, without an output matrix that config.json implies but the files lack.

    An embedding model may be saved as the bare decoder with the config.json of the full model.

    Raises:
        CheckpointError: as `read_model_spec`, or files are missing or broken.
    """
    spec = read_model_spec(model_path)
    if spec.is_tied or not isinstance(spec, DecoderSpec):
        return spec
    with opened(Path(model_path)) as tensors:
        is_bare = EMBEDDING in tensors and tensors[EMBEDDING].name == EMBEDDING.removeprefix("model.")
        return replace(spec, is_tied=True, generates=False) if is_bare and HEAD not in tensors else spec
