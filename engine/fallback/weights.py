"""Reads checkpoints in place of transformers: dequantizes weights, or extracts the text decoder of a larger model."""

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
"""Last name component of the tensor that marks a module as quantized, unless its dtype is in `FLOATS`."""


def read_tensors(path: str, stored: Stored | None, dtype: torch.dtype, *, is_part: bool) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint by the names of a standalone decoder.

    Args:
        stored: layout of quantized modules; each is returned as one `weight` of `dtype`.
        is_part: the decoder is part of a larger model, whose other tensors are left out.

    Raises:
        CheckpointError: files are missing or broken, or the tensors of a module do not fit together.
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
            # A quantized weight's extra tensors may have names below its own.
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
