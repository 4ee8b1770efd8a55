"""The geometry of a decoder that transformers computes, over our cache and by our attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from adapters.module_forms import part_widths
from engine.decoder.model_spec import ModelSpec

GATE_UP = "gate_up_proj"
WIDE_BYTES = 4


class StateKey(NamedTuple):
    """One of the tensors that a layer keeps instead of keys, or beside them, as its module asks for it."""

    layer: int
    kind: Literal["conv", "recurrent"]
    number: int


@dataclass(frozen=True, slots=True)
class StateForm:
    """What a text keeps of it, however long it is.

    Attributes:
        shape: of numbers.
        is_wide: float32, whatever the model computes with.
    """

    shape: tuple[int, ...]
    is_wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackSpec(ModelSpec):
    """A decoder that has no family of ours, and attends as ours do: transformers computes all but the attention.

    Layers may have fewer heads of keys than `num_kv_heads`, and shorter ones than `head_dim`, values too.

    Attributes:
        modules: (in, out) features of what takes an adapter, by name; with biases (out,).
        gate_up_size: of a gate and what it is multiplied by, where they are modules in one; else 0.
        num_weights, num_layer_weights: of the whole model, and without embedding and output matrix.
        attending: which of the model's layers `layers` are: those that attend, in their order.
        depth: how many layers the model has.
        states: what others keep, or the same beside keys.
        state_modules: the names of the modules that do.
    """

    modules: Mapping[str, tuple[int, ...]]
    gate_up_size: int
    num_weights: int
    num_layer_weights: int
    attending: tuple[int, ...]
    depth: int
    states: Mapping[StateKey, StateForm] = field(default_factory=dict)
    state_modules: tuple[str, ...] = ()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """As `ModelSpec` says."""
        return {name: (shape[0], shape[1]) for name, shape in self.modules.items() if len(shape) == 2}

    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `ModelSpec` says."""
        return dict(self.modules)

    def widths(self) -> Mapping[str, Mapping[str, int]]:
        """As `ModelSpec` says, of what is a module in one here, or may be one in an adapter."""
        halves = dict.fromkeys(("gate_proj", "up_proj"), self.gate_up_size // 2)
        return part_widths(self.modules) | ({GATE_UP: halves} if self.gate_up_size else {})

    def state_bytes(self, element_bytes: int) -> int:
        """As `ModelSpec` says."""
        return sum(prod(form.shape) * (WIDE_BYTES if form.is_wide else element_bytes) for form in self.states.values())

    def num_model_layers(self) -> int:
        """As `ModelSpec` says."""
        return self.depth
