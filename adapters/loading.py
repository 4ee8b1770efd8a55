"""From an adapter's folder to its weights in host memory: read, identify, fit to the base, check, cast."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from adapters.errors import AdapterError
from adapters.identity import AdapterRef, content_digest, read_adapter
from adapters.tensor_file import TensorEntry, TensorFile
from adapters.validate import LinearShapes, ModuleLayout, validate
from adapters.weights import AdapterWeights, RawProjection, build_weights

_TORCH_DTYPE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def load_adapter(ref: AdapterRef, linear_shapes: LinearShapes, max_rank: int, dtype: torch.dtype) -> AdapterWeights:
    """Load the adapter that a reference names, from disk into host memory; safe on any thread.

    Raises:
        AdapterError: the files are missing or malformed, are not those that were declared, do not fit the base model,
            or hold numbers that are not finite in `dtype`.
    """
    config, tensors = read_adapter(ref.name, ref.path)
    layouts = validate(ref.name, config, tensors.entry_by_name, linear_shapes, max_rank)
    if content_digest(config, tensors) != ref.digest:
        # Serving other content under this digest would make every cache that is keyed by it lie.
        raise AdapterError(ref.name, "its files have changed since it was declared; declare it anew")
    raw = {
        key: RawProjection(a=_tensor(tensors, layout.a), b=_tensor(tensors, layout.b), scaling=layout.scaling)
        for key, layout in layouts.items()
    }
    weights = build_weights(raw, dtype)
    if not weights.flat.isfinite().all():
        raise AdapterError(ref.name, _find_not_finite(raw, layouts, dtype))
    return weights


def _tensor(tensors: TensorFile, entry: TensorEntry) -> torch.Tensor:
    """View a tensor of the file; shapes are non-empty by `validate`."""
    count = (entry.end - entry.start) // _TORCH_DTYPE[entry.dtype].itemsize
    flat = torch.frombuffer(tensors.data, dtype=_TORCH_DTYPE[entry.dtype], count=count, offset=entry.start)
    return flat.view(entry.shape)


def _find_not_finite(
    raw: Mapping[tuple[int, str], RawProjection], layouts: Mapping[tuple[int, str], ModuleLayout], dtype: torch.dtype
) -> str:
    """Name the tensor to blame."""
    for key, item in raw.items():
        for tensor, entry in ((item.a, layouts[key].a), (item.b, layouts[key].b)):
            if not tensor.isfinite().all():
                return f"tensor {entry.name!r} holds NaN or infinity"
    return f"its numbers, scaled by alpha, overflow in {str(dtype).removeprefix('torch.')}"
