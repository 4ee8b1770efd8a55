"""Reads checkpoints that transformers itself does not: of few bits, as numbers, and of a whole the part for text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from engine.decoder.stored import Stored
from engine.decoder.tensor_kinds import FLOATS
from engine.errors import CheckpointError
from engine.loading.contents import StoredTensor, opened
from engine.loading.names import HEAD, IGNORED_SUFFIXES, PREFIX_BY_PART
from engine.loading.weight import dense, read_stored

HELD = ("weight_packed", "qweight", "weight")
"""The last names of the tensor that makes a module one of few bits; a `weight` of floats does not."""


def read_tensors(path: str, stored: Stored | None, dtype: torch.dtype, *, is_part: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by the names that a decoder by itself has.

    Args:
        stored: of modules that have few bits there is one `weight` of `dtype` then.
        is_part: the decoder is the part for text of a model; what belongs to others is left out.

    Raises:
        CheckpointError: files are missing or broken, or tensors that belong together do not fit.
    """
    with opened(Path(path), "pt") as every:
        own = (*PREFIX_BY_PART, HEAD)
        tensors = {name: tensor for name, tensor in every.items() if not is_part or tensor.name.startswith(own)}
        modules: set[str] = set()
        numbers: dict[str, torch.Tensor] = {}
        if stored is not None:
            modules = {name.rpartition(".")[0] for name, tensor in tensors.items() if _is_held(name, tensor)}
            numbers = {f"{module}.weight": _read(path, module, stored, dtype, tensors) for module in modules}
        for name, tensor in tensors.items():
            # What belongs to a weight may have a name below it.
            belongs = any(name.rsplit(".", depth)[0] in modules for depth in (1, 2, 3))
            if name.endswith(".bias") or not (belongs or name.endswith(IGNORED_SUFFIXES)):
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
