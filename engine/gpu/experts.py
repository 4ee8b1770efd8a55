"""The weights of a layer's experts on a GPU: of the model's dtype, 8-bit, or 4-bit including MXFP4.

Kernels dequantize weights as they read them, and inputs are not quantized: each expert has few rows, so its products
are bound by reading the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

import torch

from engine.gpu.adapters import TritonLora
from engine.gpu.streamed_linear import matrix_of
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.weight import Weight, split
from engine.lora import LoraProducts
from kernels.experts.launch import Change, ExpertMatrix
from kernels.mxfp4.reference import can_pack, pack_mxfp4
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, Matrix

_logger = logging.getLogger(__name__)


def laid_out(weight: Weight, count: int, quantization: str | None) -> ExpertMatrix:
    """Lay out the weight of `count` experts, one at a time, so that temporary memory is that of a single expert.

    MXFP4 is packed as it is, whatever `quantization` says, which never has fewer bits. Only with exponents that cannot
    be packed, which no known model has, is it handled like a dense weight.
    """
    if isinstance(weight, Mxfp4Weight):
        if can_pack(weight.exponents):
            return pack_mxfp4(weight.blocks, weight.exponents, weight.dtype)
        _logger.warning("MXFP4 experts have scales above 2, or none; they are dequantized")
    if quantization is None and isinstance(weight, torch.Tensor):
        return weight.flatten(0, -2)
    return _joined([matrix_of(part, quantization) for part in split(weight, count)])


def change_of(lora: LoraProducts | None, layer: int, count: int) -> Change | None:
    """Return what changes the products of a layer's experts; None if no adapter of the step does."""
    return partial(lora.change_experts, layer, count) if isinstance(lora, TritonLora) and lora.has_experts else None


def _joined(parts: Sequence[Matrix]) -> Matrix:
    """Concatenate matrices of one kind along their rows."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    few = [part for part in parts if not isinstance(part, torch.Tensor)]
    held, units = torch.cat([part.held for part in few]), torch.cat([part.units for part in few], dim=-1)
    if isinstance(parts[0], Fp8Matrix):
        return Fp8Matrix(held, units)
    return Int4Matrix(held, units, parts[0].dtype)
