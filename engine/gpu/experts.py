"""A layer's mixture of experts on a GPU: weights of the model's type, of 8 bits or of 4, among these MXFP4.

Weights of few bits become numbers on their way, and inputs are not rounded: of tokens that meet a few of many experts
each has few rows, whose products take as long as the weights take to be read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch

from engine.backend import ExpertBiases
from engine.decoder.experts import ExpertSpec
from engine.gpu.adapters import TritonLora
from engine.gpu.streamed_linear import StreamedLinear, matrix_of
from engine.loading.mxfp4 import Mxfp4Weight
from engine.loading.weight import Weight, split
from engine.lora import LoraProducts
from kernels.experts.launch import ExpertMatrix, counters, multiply_by_experts
from kernels.gated_activation.reference import Activation
from kernels.mxfp4.reference import can_pack, pack_mxfp4
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, Matrix

_logger = logging.getLogger(__name__)


class Experts:
    """A mixture of experts as `engine.backend.Backend.experts` defines it.

    Args:
        router: the product that makes logits.
        gate_up, down: as `laid_out` makes them.
        decodes: tells which rows of the step under way have one token or none, as `engine.attention.AttentionBatch` has
            them.
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
        """Return what the mixture adds to rows [rows, hidden], save those that fill a recorded step up."""
        change = None
        if isinstance(lora, TritonLora) and lora.has_experts:
            change = partial(lora.change_experts, layer, self._spec.count)
        return multiply_by_experts(
            h,
            self._router(h),
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


def laid_out(weight: Weight, count: int, quantization: str | None) -> ExpertMatrix:
    """Lay out the weight of `count` experts, one after the other: what each takes on the way is little beside all.

    Of MXFP4 nothing is rounded: no `quantization` has fewer bits. Only exponents that no model has make numbers of it.
    """
    if isinstance(weight, Mxfp4Weight):
        if can_pack(weight.exponents):
            return pack_mxfp4(weight.blocks, weight.exponents, weight.dtype)
        _logger.warning("experts in MXFP4 have scales above 2, or none; they become numbers")
    if quantization is None and isinstance(weight, torch.Tensor):
        return weight.flatten(0, -2)
    return _joined([matrix_of(part, quantization) for part in split(weight, count)])


def _joined(parts: Sequence[Matrix]) -> Matrix:
    """Put matrices of one kind one below the other."""
    if isinstance(parts[0], torch.Tensor):
        return torch.cat([part for part in parts if isinstance(part, torch.Tensor)])
    few = [part for part in parts if not isinstance(part, torch.Tensor)]
    held, units = torch.cat([part.held for part in few]), torch.cat([part.units for part in few], dim=-1)
    if isinstance(parts[0], Fp8Matrix):
        return Fp8Matrix(held, units)
    return Int4Matrix(held, units, parts[0].dtype)
