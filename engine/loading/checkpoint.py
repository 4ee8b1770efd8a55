"""Reads the weights of a folder in Hugging Face layout: safetensors, one file or sharded, mapped into memory.

Nothing missing, nothing left over: every tensor of the checkpoint is used, every parameter of the decoder is filled,
and shapes are checked against config.json before the first byte of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open

from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.tensor_kinds import TensorKind
from engine.errors import CheckpointError
from engine.loading.names import IGNORED_SUFFIXES, Parameter, parameters
from engine.loading.weight import Weight, dense, is_passed_over, read_stored, stack
from engine.loading.weight_files import open_whole, weight_files
from kernels.arena import lazy_zeros

WeightSource = Callable[[str, DecoderSpec, torch.dtype, torch.device], Iterable[tuple[str, Weight]]]
"""What `load_parameters` is: where the parameters of a decoder come from."""


def load_parameters(
    model_path: str, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Weight]]:
    """Yield (parameter name, tensor) for every parameter of the decoder, cast once, or as it is where it has few bits.

    The tensors are owned by the caller and share no memory with the files.

    Raises:
        CheckpointError: files or tensors are missing, truncated, left over, or of a wrong shape or dtype.
    """
    with _opened(Path(model_path)) as file_by_tensor:
        wanted = list(parameters(spec))
        _check_complete(model_path, spec, _expected(spec, wanted, file_by_tensor), file_by_tensor)
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
            if spec.stored is not None and _is_weight(spec, name):
                return dense(_read_stored(name, spec.stored, dtype, torch.device("cpu"), file_by_tensor))
            tensor: torch.Tensor = file_by_tensor[name].get_tensor(name)
        except KeyError as error:
            raise CheckpointError(f"{model_path}: the tensor {error.args[0]} is missing.") from None
        return tensor.to(dtype)


@contextmanager
def _opened(folder: Path) -> Iterator[Mapping[str, safe_open]]:
    """Open a checkpoint's files; the file of each tensor, by the tensor's name."""
    with ExitStack() as opened:
        file_by_tensor: dict[str, safe_open] = {}
        for path in weight_files(folder):
            file = opened.enter_context(open_whole(path, framework="pt"))
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
    if spec.stored is not None and _is_weight(spec, names[0]):
        return stack([_read_stored(name, spec.stored, dtype, device, file_by_tensor) for name in names])
    if device.type == "cpu":
        # Freed, it is the system's at once. The C library would keep it, and seldom find it fit for the next.
        whole = lazy_zeros(parameter.numel, dtype).view(parameter.shape)
    else:
        whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    row = 0
    for name, shape in parameter.parts:
        whole[row : row + shape[0]].copy_(file_by_tensor[name].get_tensor(name))
        row += shape[0]
    return whole


def _read_stored(
    name: str, stored: Stored, dtype: torch.dtype, device: torch.device, file_by_tensor: Mapping[str, safe_open]
) -> Weight:
    return read_stored(
        lambda part: file_by_tensor[part].get_tensor(part).to(device), name.removesuffix(".weight"), stored, dtype
    )


def _is_weight(spec: DecoderSpec, name: str) -> bool:
    return name.endswith(".weight") and _is_linear(spec, name)


def _is_linear(spec: DecoderSpec, name: str) -> bool:
    """Tell whether a tensor is of a linear module of the layers."""
    module = name.rpartition(".")[0]
    return module.endswith("_proj") and module in spec.linear_shapes()


def _expected(
    spec: DecoderSpec, wanted: Sequence[Parameter], file_by_tensor: Mapping[str, safe_open]
) -> dict[str, TensorKind]:
    """Return the tensors that a checkpoint must have."""
    expected: dict[str, TensorKind] = {}
    for name, shape in (part for parameter in wanted for part in parameter.parts):
        if spec.stored is not None and _is_weight(spec, name):
            file = file_by_tensor.get(name)
            dtype = None if file is None else str(file.get_slice(name).get_dtype())
            expected |= spec.stored.tensors(name.removesuffix(".weight"), shape, dtype)
        else:
            expected[name] = TensorKind((shape,))
    return expected


def _check_complete(
    where: str,
    spec: DecoderSpec,
    kind_by_name: Mapping[str, TensorKind],
    file_by_tensor: Mapping[str, safe_open],
) -> None:
    for name, kind in kind_by_name.items():
        if name not in file_by_tensor:
            raise CheckpointError(f"{where}: the tensor {name} is missing.")
        found = file_by_tensor[name].get_slice(name)
        if tuple(found.get_shape()) not in kind.shapes:
            known = " or ".join(str(list(shape)) for shape in kind.shapes)
            raise CheckpointError(
                f"{where}: the tensor {name} has shape {found.get_shape()}, config.json says {known}."
            )
        if found.get_dtype() not in kind.dtypes:
            raise CheckpointError(
                f"{where}: the tensor {name} has type {found.get_dtype()}; known are {', '.join(kind.dtypes)}."
            )
    tied = {"lm_head.weight"} if spec.is_tied else set()
    for name, file in file_by_tensor.items():
        if name in kind_by_name or name in tied or name.endswith(IGNORED_SUFFIXES):
            continue
        stored = spec.stored if _is_linear(spec, name) else None
        if stored is None or not is_passed_over(name, file.get_tensor, stored):
            raise CheckpointError(f"{where}: the tensor {name} belongs to nothing in a {spec.architecture}.")
