"""Linear products with weights laid out once for the processor.

On CPUs with fast bfloat16, oneDNN's blocked layout streams weights about twice as fast as the plain one at the few rows
of a decode step. Weights are therefore re-ordered at load, and the plain copy is dropped.
"""

from __future__ import annotations

import platform

import torch
from torch.nn import functional

PACK_ROWS = 32
"""Number of rows that the blocked layout is optimized for: decode batches. oneDNN still takes any number."""


class Linear:
    """y = x W^T + b for a fixed W [out, in].

    Args:
        weight: [out, in]; the caller gives up ownership.
        bias: [out] or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._bias = bias
        # Whatever else a device computes by torch's operators, the layout is the processor's.
        self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and has_fast_bfloat16()
        self._weight = _pack(weight) if self._packed else weight.contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [tokens, in]; returns [tokens, out] in the dtype of `x`."""
        if self._packed:
            product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
            return product
        return functional.linear(x, self._weight, self._bias)


def has_fast_bfloat16() -> bool:
    """Return whether this processor has instructions that multiply bfloat16."""
    if not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        return False
    # oneDNN also "supports" bfloat16 on plain AVX512, where it converts and is slower than float32.
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return not is_x86 or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), PACK_ROWS)
    return packed
