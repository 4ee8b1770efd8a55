"""What `system_fingerprint` tells of a base model: a digest of its weights and of how the engine computes with them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

NUM_SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def model_fingerprint(folder: str, computation: str) -> str:
    """Return a digest in hex; of large files it reads `NUM_SAMPLES` evenly spaced pieces, the first and last included.

    Weights that were trained differ nearly everywhere, so that the pieces tell them apart without reading gigabytes.

    Args:
        folder: of the checkpoint.
        computation: whatever of the engine's configuration changes its numbers.
    """
    digest = hashlib.sha256(computation.encode())
    for path in sorted([Path(folder) / "config.json", *Path(folder).glob("*.safetensors")]):
        size = path.stat().st_size
        digest.update(f"\n{path.name} {size}\n".encode())
        step = max(SAMPLE_BYTES, (size - SAMPLE_BYTES) // (NUM_SAMPLES - 1))
        with open(path, "rb") as file:
            for start in (*range(0, max(1, size - SAMPLE_BYTES), step), max(0, size - SAMPLE_BYTES)):
                file.seek(start, os.SEEK_SET)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
