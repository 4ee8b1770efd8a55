"""Two digests: of a base model's weights and how the engine computes with them, which is behind `system_fingerprint`,
and of our code.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {".py", ".cpp", ".h"}
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


def code_digest(packages: Iterable[str]) -> str:
    """Return a hex digest of the source files of some of our packages."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted((ROOT / package).rglob("*")):
            if path.suffix in SOURCES and path.is_file():
                digest.update(f"\n{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()
