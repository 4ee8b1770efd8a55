"""Finds the files with a checkpoint's weights and checks by their headers that each is complete. Needs no torch."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open

from engine.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def check_weight_files(folder: Path) -> None:
    """Check that a checkpoint's files exist and are as long as their headers say; raises as the functions it calls."""
    for path in weight_files(folder):
        open_whole(path, framework="numpy")


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold a checkpoint's tensors.

    Raises:
        CheckpointError: there are none, or one that the index names is missing.
    """
    if (folder / SINGLE).is_file():
        # An index beside it is left over from the sharded files it was made from.
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files.") from None
        paths = [folder / str(name) for name in names]
        for path in paths:
            # A name that leads out of the folder would read files that the operator did not configure.
            if path.name not in names or not path.is_file():
                raise CheckpointError(
                    f"{folder / INDEX}: it names {str(path)!r}, but there is no such file in the folder."
                )
        return paths
    raise CheckpointError(f"{folder}: there is neither {SINGLE} nor {INDEX}.{_hint(folder)}")


def _hint(folder: Path) -> str:
    """Return a sentence about weight files that cannot be read, or an empty string."""
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return f" It has {others[0]}, a name that is not Hugging Face's."
    pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickled:
        return f" It has {pickled[0]}, but only safetensors are read: pickled weights can run code."
    others = sorted(path.name for path in folder.glob("*.gguf"))
    return f" It has {others[0]}, but only safetensors are read." if others else ""


def open_whole(path: Path, *, framework: str) -> safe_open:
    """Open one file, as a context manager.

    Raises:
        CheckpointError: it is unreadable, truncated, or not a safetensors file.
    """
    try:
        return safe_open(path, framework=framework)
    except (SafetensorError, OSError) as error:
        reason = "a pointer of Git LFS; fetch what it points to" if _is_pointer(path) else str(error)
        raise CheckpointError(f"{path}: not a complete safetensors file ({reason}).") from None


def _is_pointer(path: Path) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(LFS_POINTER)) == LFS_POINTER
    except OSError:
        return False
