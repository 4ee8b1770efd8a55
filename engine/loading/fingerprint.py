"""The digest behind `system_fingerprint`: a base model's weights and how the engine computes with them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

NUM_SAMPLES = 64
SAMPLE_BYTES = 1 << 16


def model_fingerprint(folder: str, computation: str) -> str:
    """Return a hex digest; of large files, hash `NUM_SAMPLES` evenly spaced pieces, the first and last included.

    Different trained weights differ nearly everywhere, so the pieces distinguish them without reading gigabytes.

    Args:
        folder: the checkpoint.
        computation: all engine settings that change numerical results.
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
