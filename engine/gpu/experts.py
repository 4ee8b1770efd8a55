"""A layer's mixture of experts on a GPU: weights of the model's dtype, 8-bit, or 4-bit including MXFP4.

Kernels dequantize weights as they read them, and inputs are not quantized: each expert has few rows, so its products
are bound by reading the weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from adapters.peft_format import ROUTER
from engine.backend import ExpertBiases
from engine.decoder.experts import ExpertSpec
from engine.gpu.adapters import TritonLora
from engine.gpu.streamed_linear import StreamedLinear, matrix_of
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.weight import Weight, split
from engine.lora import LoraProducts
from kernels.experts.launch import Change, ExpertMatrix, multiply_by_chosen, multiply_by_experts
from kernels.experts.routing import counters
from kernels.gated_activation.reference import Activation
from kernels.mxfp4.reference import can_pack, pack_mxfp4
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, Matrix

_logger = logging.getLogger(__name__)


class Experts:
    """A mixture of experts as `engine.backend.Backend.experts` defines it.

    Args:
        router: the product that computes logits.
        gate_up, down: as `laid_out` returns them.
        decodes: returns the current step's rows of one token or none, as in `engine.attention.AttentionBatch`.
        biases: None for none.
    """

    def __init__(
        self,
        router: StreamedLinear,
        gate_up: ExpertMatrix,
        down: ExpertMatrix,
        spec: ExpertSpec,
        activation: Activation,
        decodes: Callable[[], torch.Tensor | None],
        biases: ExpertBiases | None = None,
    ) -> None:
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._spec = spec
        self._activation = activation
        self._decodes = decodes
        self._biases = biases and biases[1:]
        self._counts = counters(spec.count, router.device)

    def __call__(self, h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
        """Return the mixture's output [rows, hidden]; rows that only pad a recorded step are undefined."""
        change, count = _change(lora, layer, self._spec.count), self._spec.count
        if lora is None or change is None:
            logits = self._router(h)
        else:
            logits = lora.multiply(self._router, h, layer, (ROUTER,), (count,))
        return multiply_by_experts(
            h,
            logits,
            self._gate_up,
            self._down,
            self._counts,
            chosen=self._spec.chosen,
            is_normed=self._spec.is_normed,
            activation=self._activation,
            biases=self._biases,
            decodes=self._decodes(),
            change=change,
        )


class RoutedExperts:
    """Experts as `engine.backend.Backend.routed_experts` defines them; arguments as in `Experts`."""

    def __init__(self, gate_up: ExpertMatrix, down: ExpertMatrix, count: int, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation
        self._count = count
        self._counts = counters(count, (down if isinstance(down, torch.Tensor) else down.held).device)

    def __call__(
        self,
        h: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        decodes: torch.Tensor | None,
        lora: LoraProducts | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Return the weighted sum [rows, hidden]."""
        return multiply_by_chosen(
            h,
            experts.int().contiguous(),
            weights.float().contiguous(),
            self._gate_up,
            self._down,
            self._counts,
            activation=self._activation,
            decodes=decodes,
            change=_change(lora, layer, self._count),
        )


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


def _change(lora: LoraProducts | None, layer: int, count: int) -> Change | None:
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
