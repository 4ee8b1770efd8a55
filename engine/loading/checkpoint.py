"""Reads the weights of a folder in Hugging Face layout: safetensors, one file or sharded, mapped into memory.

Nothing missing, nothing left over: every tensor of the checkpoint is used, every parameter of the decoder is filled,
and shapes are checked against config.json before the first byte of a tensor is read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from engine.decoder.spec import DecoderSpec
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import CheckpointError
from engine.loading.int4 import Int4Weight, Weight, dense, is_in_order, read_int4, stack
from engine.loading.names import IGNORED_SUFFIXES, Parameter, parameters

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")
PACKED_SUFFIXES = (".qweight", ".qzeros")
PACKED_DTYPES = ("I32",)

WeightSource = Callable[[str, DecoderSpec, torch.dtype, torch.device], Iterable[tuple[str, Weight]]]
"""What `load_parameters` is: where the parameters of a decoder come from."""


def load_parameters(
    model_path: str, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Weight]]:
    """Yield (parameter name, tensor) for every parameter of the decoder, cast once, or as it is where it has 4 bits.

    The tensors are owned by the caller and share no memory with the files.

    Raises:
        CheckpointError: files or tensors are missing, truncated, left over, or of a wrong shape or dtype.
    """
    with _opened(Path(model_path)) as file_by_tensor:
        wanted = list(parameters(spec))
        _check_complete(model_path, spec, _expected(spec, wanted), file_by_tensor)
        for parameter in wanted:
            yield parameter.name, _read(parameter, spec, dtype, device, file_by_tensor)


def read_tensor(model_path: str, spec: DecoderSpec, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return one tensor of a checkpoint that `load_parameters` has taken, cast; `lm_head.weight` also where it is tied.

    Raises:
        CheckpointError: it is not there any more.
    """
    if spec.is_tied and name == "lm_head.weight":
        name = "model.embed_tokens.weight"
    with _opened(Path(model_path)) as file_by_tensor:
        try:
            if spec.stored is not None and _module_of(spec, name) is not None:
                return dense(_read_int4(name, spec.stored, dtype, torch.device("cpu"), file_by_tensor))
            tensor: torch.Tensor = file_by_tensor[name].get_tensor(name)
        except KeyError as error:
            raise CheckpointError(f"{model_path}: the tensor {error.args[0]} is missing.") from None
        return tensor.to(dtype)


@contextmanager
def _opened(folder: Path) -> Iterator[Mapping[str, safe_open]]:
    """Open a checkpoint's files; the file of each tensor, by the tensor's name."""
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
        yield file_by_tensor


def _read(
    parameter: Parameter,
    spec: DecoderSpec,
    dtype: torch.dtype,
    device: torch.device,
    file_by_tensor: Mapping[str, safe_open],
) -> Weight:
    """Stack a parameter's parts on the device."""
    names = [name for name, _ in parameter.parts]
    if spec.stored is not None and _module_of(spec, names[0]) is not None:
        return stack([_read_int4(name, spec.stored, dtype, device, file_by_tensor) for name in names])
    whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    row = 0
    for name, shape in parameter.parts:
        whole[row : row + shape[0]].copy_(file_by_tensor[name].get_tensor(name))
        row += shape[0]
    return whole


def _read_int4(
    name: str, stored: StoredInt4, dtype: torch.dtype, device: torch.device, file_by_tensor: Mapping[str, safe_open]
) -> Int4Weight:
    return read_int4(
        lambda part: file_by_tensor[part].get_tensor(part).to(device), name.removesuffix(".weight"), stored, dtype
    )


def _module_of(spec: DecoderSpec, name: str) -> str | None:
    """Return the linear module of the layers that a tensor belongs to, None for all others."""
    module = name.rpartition(".")[0]
    return module if module.endswith("_proj") and module in spec.linear_shapes() else None


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


def _expected(spec: DecoderSpec, wanted: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    """Return the tensors that a checkpoint must have, and their shapes."""
    expected: dict[str, tuple[int, ...]] = {}
    for name, shape in (part for parameter in wanted for part in parameter.parts):
        if spec.stored is not None and name.endswith("_proj.weight"):
            expected |= spec.stored.shapes(name.removesuffix(".weight"), *shape)
        else:
            expected[name] = shape
    return expected


def _check_complete(
    where: str,
    spec: DecoderSpec,
    shape_by_name: Mapping[str, tuple[int, ...]],
    file_by_tensor: Mapping[str, safe_open],
) -> None:
    for name, shape in shape_by_name.items():
        if name not in file_by_tensor:
            raise CheckpointError(f"{where}: the tensor {name} is missing.")
        found = file_by_tensor[name].get_slice(name)
        if tuple(found.get_shape()) != shape:
            raise CheckpointError(
                f"{where}: the tensor {name} has shape {found.get_shape()}, config.json says {list(shape)}."
            )
        known = PACKED_DTYPES if name.endswith(PACKED_SUFFIXES) else DTYPES
        if found.get_dtype() not in known:
            raise CheckpointError(
                f"{where}: the tensor {name} has type {found.get_dtype()}; known are {', '.join(known)}."
            )
    tied = {"lm_head.weight"} if spec.is_tied else set()
    for name, file in file_by_tensor.items():
        if name in shape_by_name or name in tied or name.endswith(IGNORED_SUFFIXES):
            continue
        says_nothing = spec.stored is not None and _says_nothing(name, spec.stored, file)
        if not says_nothing or _module_of(spec, name) is None:
            raise CheckpointError(f"{where}: the tensor {name} belongs to nothing in a {spec.architecture}.")


def _says_nothing(name: str, stored: StoredInt4, file: safe_open) -> bool:
    """Tell whether what comes along with weights of 4 bits changes nothing: inputs in their order, a bias of zeros."""
    if name.endswith(".g_idx"):
        return is_in_order(file.get_tensor(name), stored)
    return name.endswith(".bias") and not file.get_tensor(name).any()
