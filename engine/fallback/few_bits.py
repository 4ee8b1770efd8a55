"""Reads a checkpoint of few bits as numbers, by the names that transformers has for its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.decoder.stored import Stored
from engine.decoder.tensor_kinds import FLOATS
from engine.errors import CheckpointError
from engine.loading.contents import StoredTensor, opened
from engine.loading.names import IGNORED_SUFFIXES
from engine.loading.weight import dense, read_stored

HELD = ("weight_packed", "qweight", "weight")
"""The last names of the tensor that makes a module one of few bits; a `weight` of floats does not."""


def read_numbers(path: str, stored: Stored, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint by name, those of modules that have few bits as one `weight` of `dtype`.

    Raises:
        CheckpointError: files are missing or broken, or tensors that belong together do not fit.
    """
    with opened(Path(path), "pt") as tensors:
        modules = {name.rpartition(".")[0] for name, tensor in tensors.items() if _is_held(name, tensor)}
        numbers = {f"{module}.weight": _read(path, module, stored, dtype, tensors) for module in modules}
        for name, tensor in tensors.items():
            # What belongs to a weight may have a name below it.
            is_part = any(name.rsplit(".", depth)[0] in modules for depth in (1, 2, 3))
            if name.endswith(".bias") or not (is_part or name.endswith(IGNORED_SUFFIXES)):
                numbers[name] = tensor.read()
    return numbers


def _is_held(name: str, tensor: StoredTensor) -> bool:
    return name.rpartition(".")[2] in HELD and tensor.dtype not in FLOATS


def _read(
    path: str, module: str, stored: Stored, dtype: torch.dtype, tensors: Mapping[str, StoredTensor]
) -> torch.Tensor:
    try:
        return dense(read_stored(lambda name: tensors[name].read(), module, stored, dtype))
    except KeyError as error:
        raise CheckpointError(f"{path}: the tensor {error.args[0]} is missing.") from None
    except (RuntimeError, IndexError) as error:
        raise CheckpointError(f"{path}: the tensors of {module} do not fit: {error}") from None
