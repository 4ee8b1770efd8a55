"""Quantization of inputs to 8-bit floats in the kernels that produce them: norms and activations hold whole rows."""

from __future__ import annotations

import torch

from kernels.add_rms_norm.launch import add_rms_norm
from kernels.gated_activation.launch import MAX_ROUNDED_WIDTH, activate_and_multiply
from kernels.gated_activation.reference import Activation
from kernels.row_quantization.launch import Rounded, empty_rounded, quantize_rows
from kernels.streamed_linear.launch import MAX_ROWS
from kernels.streamed_linear.reference import FP8


class InputRounding:
    """Keeps an input quantized by its producer for the one product that reads it; other inputs take a separate launch.

    Args:
        is_wanted: whether products read 8-bit inputs at all. Those of a row or two do not (`row_linear`).
    """

    def __init__(self, *, is_wanted: bool = False) -> None:
        self._is_wanted = is_wanted
        self._kept: tuple[torch.Tensor, Rounded] | None = None

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, *, is_final: bool
    ) -> torch.Tensor:
        """Add and norm in one pass; `is_final` means that nothing changes the norm's result before it is read."""
        if not (self._is_needed(x) and is_final):
            return add_rms_norm(x, delta, weight, eps)
        rounded = empty_rounded(x, FP8)
        return self._keep(add_rms_norm(x, delta, weight, eps, rounded), rounded)

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Activate and multiply in one pass."""
        width = gate_up.shape[1] // 2
        if not self._is_needed(gate_up) or width > MAX_ROUNDED_WIDTH:
            return activate_and_multiply(gate_up, activation)
        rounded = empty_rounded(gate_up[:, :width], FP8)
        return self._keep(activate_and_multiply(gate_up, activation, rounded), rounded)

    def take(self, x: torch.Tensor) -> Rounded:
        """Return the quantized rows of `x`, for the only product that reads them."""
        kept, self._kept = self._kept, None
        return kept[1] if kept is not None and kept[0] is x else quantize_rows(x, FP8)

    def _is_needed(self, x: torch.Tensor) -> bool:
        return self._is_wanted and len(x) > MAX_ROWS

    def _keep(self, x: torch.Tensor, rounded: Rounded) -> torch.Tensor:
        self._kept = x, rounded
        return x
