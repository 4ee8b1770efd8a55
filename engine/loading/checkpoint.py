"""Reads the weights of a folder in Hugging Face layout: safetensors, one file or sharded, mapped into memory.

Every tensor of the checkpoint is used and every parameter of the decoder is filled, or `engine.loading.contents` says
what is wrong before the first byte of a tensor is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.tensor_kinds import FLOATS
from engine.errors import CheckpointError
from engine.loading.contents import StoredTensor, check_complete, opened
from engine.loading.names import EMBEDDING, HEAD, Parameter, parameters
from engine.loading.weight import Weight, dense, read_stored, stack
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
    with opened(Path(model_path), "pt") as tensors:
        wanted = list(parameters(spec))
        check_complete(model_path, spec, wanted, tensors)
        of_stored = spec.stored_shapes()
        for parameter in wanted:
            is_stored = parameter.parts[0][0].removesuffix(".weight") in of_stored
            stored = spec.stored if is_stored else None
            yield parameter.name, _read(parameter, stored, dtype, device, tensors)


def read_tensor(model_path: str, spec: ModelSpec, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return one tensor of a checkpoint that `load_parameters` has taken, cast; `lm_head.weight` also where it is tied.

    Raises:
        CheckpointError: it is not there any more.
    """
    if spec.is_tied and name == HEAD:
        name = EMBEDDING
    with opened(Path(model_path), "pt") as tensors:
        try:
            if spec.stored is not None and name.removesuffix(".weight") in spec.linear_shapes():
                module = Parameter(name=name, parts=())
                return dense(_read_stored(name, spec.stored, dtype, torch.device("cpu"), tensors, module))
            return tensors[name].read().to(dtype)
        except KeyError as error:
            raise CheckpointError(f"{model_path}: the tensor {error.args[0]} is missing.") from None


def _read(
    parameter: Parameter,
    stored: Stored | None,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Mapping[str, StoredTensor],
) -> Weight:
    """Stack a parameter's parts, of few bits where `stored` says how, on the device."""
    dtype = torch.float32 if parameter.is_wide else dtype
    if stored is not None:
        return stack([_read_stored(name, stored, dtype, device, tensors, parameter) for name, _ in parameter.parts])
    if device.type == "cpu":
        # Freed, it is the system's at once. The C library would keep it, and seldom find it fit for the next.
        whole = lazy_zeros(parameter.numel, dtype).view(parameter.shape)
    else:
        whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    row = 0
    for name, shape in parameter.parts:
        part = _arranged(tensors[name].read(), parameter)
        whole[row : row + shape[0]].view(part.shape).copy_(part)
        row += shape[0]
    return whole.add_(parameter.offset) if parameter.offset else whole


def _arranged(tensor: torch.Tensor, parameter: Parameter) -> torch.Tensor:
    """Return numbers as a parameter has them, up to dimensions that lie behind each other."""
    if parameter.is_transposed:
        tensor = tensor.transpose(-1, -2)
    return _halved(tensor) if parameter.is_paired else tensor


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    """Return [experts, 2, inner, ...] of [experts, 2 * inner, ...] in which gate and up stand in turn."""
    experts, rows = tensor.shape[:2]
    return tensor.view(experts, rows // 2, 2, *tensor.shape[2:]).transpose(1, 2)


def _read_stored(
    name: str,
    stored: Stored,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Mapping[str, StoredTensor],
    parameter: Parameter,
) -> Weight:
    """Return one part of a parameter; what has few bits never lies transposed."""

    def paired(tensor: torch.Tensor) -> torch.Tensor:
        return _halved(tensor).flatten(1, 2) if parameter.is_paired else tensor

    if name in tensors and tensors[name].dtype in FLOATS:
        tensor = tensors[name].read().to(device=device, dtype=dtype)
        return paired(tensor.transpose(-1, -2) if parameter.is_transposed else tensor)
    return read_stored(
        lambda part: paired(tensors[part].read().to(device)), name.removesuffix(".weight"), stored, dtype
    )
