"""The geometry of a decoder that transformers computes, over our cache and by our attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.decoder.model_spec import ModelSpec

GATE_UP = "gate_up_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackSpec(ModelSpec):
    """A decoder that has no family of ours, and attends as ours do: transformers computes all but the attention.

    Attributes:
        value_dim: numbers of a value of one head, at most `head_dim`.
        modules: (in, out) features of what takes an adapter, by name; with biases (out,).
        gate_up_size: of a gate and what it is multiplied by, where they are modules in one; else 0.
        num_weights, num_layer_weights: of the whole model, and without embedding and output matrix.
    """

    value_dim: int
    modules: Mapping[str, tuple[int, ...]]
    gate_up_size: int
    num_weights: int
    num_layer_weights: int

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """As `ModelSpec` says."""
        return {name: (shape[0], shape[1]) for name, shape in self.modules.items() if len(shape) == 2}

    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `ModelSpec` says."""
        return dict(self.modules)

    def widths(self) -> Mapping[str, Mapping[str, int]]:
        """As `ModelSpec` says, of what is a module in one here."""
        halves = dict.fromkeys(("gate_proj", "up_proj"), self.gate_up_size // 2)
        return {GATE_UP: halves} if self.gate_up_size else {}
