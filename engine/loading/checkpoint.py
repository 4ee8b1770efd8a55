"""Reads the weights of a folder in Hugging Face layout: safetensors, one file or sharded, memory-mapped.

Every tensor must be used or known to be ignorable, and every parameter of the decoder filled;
`engine.loading.contents` checks this before loading any tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import torch

from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.tensor_kinds import FLOATS
from engine.errors import CheckpointError
from engine.loading.contents import StoredTensor, check_complete, opened
from engine.loading.names import EMBEDDING, HEAD, DecoderParameter, parameters
from engine.loading.weight import Weight, dense, read_stored, stack
from kernels.arena import lazy_zeros

WeightSource = Callable[[str, DecoderSpec, torch.dtype, torch.device], Iterable[tuple[str, Weight]]]
"""Signature of `load_parameters`: a source of decoder parameters."""
TensorReader = Callable[[str, torch.dtype], torch.Tensor]
"""Returns one tensor by its name, cast."""


def load_parameters(
    model_path: str, spec: DecoderSpec, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Weight]]:
    """Yield (parameter name, tensor) for every parameter of the decoder, cast once, or as stored if quantized.

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


@contextmanager
def tensor_reader(model_path: str, spec: ModelSpec) -> Iterator[TensorReader]:
    """Yield what reads single tensors of a checkpoint that `load_parameters` accepted, `lm_head.weight` also if tied.

    Its first call opens the files, which takes longer than reading most tensors; they stay open until the context ends.
    Each call raises CheckpointError if the tensor is no longer there.
    """
    with ExitStack() as stack:
        tensors = cache(lambda: stack.enter_context(opened(Path(model_path), "pt")))

        def read(name: str, dtype: torch.dtype) -> torch.Tensor:
            name = EMBEDDING if spec.is_tied and name == HEAD else name
            return _read_one(model_path, spec, name, dtype, tensors())

        yield read


def _read_one(
    model_path: str, spec: ModelSpec, name: str, dtype: torch.dtype, tensors: Mapping[str, StoredTensor]
) -> torch.Tensor:
    try:
        if spec.stored is not None and name.removesuffix(".weight") in spec.linear_shapes():
            module = DecoderParameter(name=name, parts=())
            return dense(_read_stored(name, spec.stored, dtype, torch.device("cpu"), tensors, module))
        return tensors[name].read().to(dtype)
    except KeyError as error:
        raise CheckpointError(f"{model_path}: the tensor {error.args[0]} is missing.") from None


def _read(
    parameter: DecoderParameter,
    stored: Stored | None,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Mapping[str, StoredTensor],
) -> Weight:
    """Stack a parameter's parts on the device; `stored` is the layout of quantized parts."""
    dtype = torch.float32 if parameter.is_wide else dtype
    if stored is not None:
        return stack([_read_stored(name, stored, dtype, device, tensors, parameter) for name, _ in parameter.parts])
    if device.type == "cpu":
        # Mapped, so that freeing it returns it to the system at once; malloc would keep it and rarely reuse it.
        whole = lazy_zeros(parameter.numel, dtype).view(parameter.shape)
    else:
        whole = torch.empty(parameter.shape, dtype=dtype, device=device)
    row = 0
    for name, shape in parameter.parts:
        part = _arranged(tensors[name].read(), shape, parameter)
        whole[row : row + shape[0]].view(part.shape).copy_(part)
        row += shape[0]
    return whole.add_(parameter.offset) if parameter.offset else whole


def _arranged(tensor: torch.Tensor, shape: tuple[int, ...], parameter: DecoderParameter) -> torch.Tensor:
    """Return a dense tensor in the parameter's order; adjacent dimensions may still need flattening."""
    if parameter.is_transposed or (parameter.is_transposed is None and tensor.shape != shape):
        tensor = tensor.transpose(-1, -2)
    return _halved(tensor) if parameter.is_paired else tensor


def _halved(tensor: torch.Tensor) -> torch.Tensor:
    """Return [experts, 2, inner, ...] from [experts, 2 * inner, ...], which interleaves gate and up."""
    experts, rows = tensor.shape[:2]
    return tensor.view(experts, rows // 2, 2, *tensor.shape[2:]).transpose(1, 2)


def _read_stored(
    name: str,
    stored: Stored,
    dtype: torch.dtype,
    device: torch.device,
    tensors: Mapping[str, StoredTensor],
    parameter: DecoderParameter,
) -> Weight:
    """Return one part of a parameter; quantized parts are never stored transposed."""

    def paired(tensor: torch.Tensor) -> torch.Tensor:
        return _halved(tensor).flatten(1, 2) if parameter.is_paired else tensor

    if name in tensors and tensors[name].dtype in FLOATS:
        tensor = tensors[name].read().to(device=device, dtype=dtype)
        return paired(tensor.transpose(-1, -2) if parameter.is_transposed else tensor)
    return read_stored(
        lambda part: paired(tensors[part].read().to(device)), name.removesuffix(".weight"), stored, dtype
    )
