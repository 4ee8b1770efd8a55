"""Reads the weights of a folder in Hugging Face layout: safetensors, one file or sharded, mapped into memory.

Nothing missing, nothing left over: every tensor of the checkpoint is used, every parameter of the decoder is filled,
and shapes are checked against config.json before the first byte of a tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.decoder.spec import DecoderSpec
from engine.errors import CheckpointError
from engine.loading.names import IGNORED_SUFFIXES, parameters

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F32", "F16", "BF16"}

WeightSource = Callable[[str, DecoderSpec, torch.dtype, torch.device], Iterable[tuple[str, torch.Tensor]]]
"""What `load_parameters` is: where the parameters of a decoder come from."""


def load_parameters(
    model_path: str, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (parameter name, tensor) for every parameter of the decoder, cast once.

    The tensors are owned by the caller and share no memory with the files.

    Raises:
        CheckpointError: files or tensors are missing, truncated, left over, or of a wrong shape or dtype.
    """
    folder = Path(model_path)
    with ExitStack() as opened:
        file_by_tensor: dict[str, safe_open] = {}
        for path in _weight_files(folder):
            try:
                file = opened.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path}: not a whole safetensors file ({error}).") from None
            for name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                if name in file_by_tensor:
                    raise CheckpointError(f"{path}: the tensor {name} is in another file of the checkpoint as well.")
                file_by_tensor[name] = file
        wanted = list(parameters(spec))
        _check_complete(model_path, spec, {n: s for p in wanted for n, s in p.parts}, file_by_tensor)
        for parameter in wanted:
            whole = torch.empty(parameter.shape, dtype=dtype, device=device)
            row = 0
            for name, shape in parameter.parts:
                whole[row : row + shape[0]].copy_(file_by_tensor[name].get_tensor(name))
                row += shape[0]
            yield parameter.name, whole


def read_tensor(model_path: str, spec: DecoderSpec, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return one tensor of a checkpoint that `load_parameters` has taken, cast; `lm_head.weight` also where it is tied.

    Raises:
        CheckpointError: it is not there any more.
    """
    if spec.is_tied and name == "lm_head.weight":
        name = "model.embed_tokens.weight"
    for path in _weight_files(Path(model_path)):
        try:
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118  (safe_open is no mapping)
                    tensor: torch.Tensor = file.get_tensor(name)
                    return tensor.to(dtype)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: not a whole safetensors file ({error}).") from None
    raise CheckpointError(f"{model_path}: the tensor {name} is missing.")


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_bytes())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{folder / INDEX}: not an index of safetensors files.") from None
        paths = [folder / str(name) for name in names]
        for path in paths:
            # A name with a way out of the folder in it would read what the operator did not configure.
            if path.name not in names or not path.is_file():
                raise CheckpointError(
                    f"{folder / INDEX}: it names {str(path)!r}, but there is no such file in the folder."
                )
        return paths
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
    hint = f" It has {others[0]}, but only safetensors are read: pickled weights can run code." if others else ""
    raise CheckpointError(f"{folder}: there is neither {SINGLE} nor {INDEX}.{hint}")


def _check_complete(
    where: str, spec: DecoderSpec, shape_by_name: dict[str, tuple[int, ...]], file_by_tensor: dict[str, safe_open]
) -> None:
    for name, shape in shape_by_name.items():
        if name not in file_by_tensor:
            raise CheckpointError(f"{where}: the tensor {name} is missing.")
        found = file_by_tensor[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"{where}: the tensor {name} has shape {found.get_shape()}, config.json says {list(shape)}."
            )
        if found.get_dtype() not in DTYPES:
            raise CheckpointError(f"{where}: the tensor {name} has type {found.get_dtype()}; known are F32, F16, BF16.")
    tied = {"lm_head.weight"} if spec.is_tied else set()
    for name in file_by_tensor:
        if name not in shape_by_name and name not in tied and not name.endswith(IGNORED_SUFFIXES):
            raise CheckpointError(f"{where}: the tensor {name} belongs to nothing in a {spec.architecture}.")
