"""Geometry of a decoder that transformers computes with the engine's KV cache and attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Literal, NamedTuple

from adapters.module_forms import part_widths
from engine.decoder.model_spec import KvShape, Mixtures, ModelSpec

WIDE_BYTES = 4
StateKind = Literal["conv", "recurrent"]
UNCALLED = ".dt_proj"
"""Name suffix of a Mamba module whose weight its layer multiplies by, without calling the module."""


class StateKey(NamedTuple):
    """Identifies one recurrent state tensor of a layer, as its module asks for it."""

    layer: int
    kind: StateKind
    number: int


@dataclass(frozen=True, slots=True)
class StateForm:
    """Size of one recurrent state per sequence, independent of its length.

    Attributes:
        shape: of the tensor.
        is_wide: float32, whatever the model's dtype.
    """

    shape: tuple[int, ...]
    is_wide: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackSpec(ModelSpec):
    """A decoder outside of `FAMILIES` with ordinary attention; transformers runs it with the engine's attention.

    Attributes:
        kv: the key heads of each of `layers`; values may have fewer dimensions.
        modules: (in, out) features of what takes an adapter, by name; (out,) for biases.
        num_weights, num_layer_weights: weights of the whole model, and without embedding and output matrix.
        places: which of `layers` has the keys and values of a layer of the model, by the index of the latter, for
            those that attend; several may attend to the same.
        depth: number of layers of the model.
        mixed: the mixtures whose experts are plain and gated (`engine.fallback.experts`); None for none.
        expert_modules: names of the modules that hold their experts, those in which adapters may change them.
        states: recurrent states, of layers that keep them instead of or beside keys.
        state_modules: names of the modules that keep them.
        rotating_modules: names of the modules that leave rotations to attention (`engine.fallback.rotations`).
    """

    modules: Mapping[str, tuple[int, ...]]
    num_weights: int
    num_layer_weights: int
    kv: tuple[KvShape, ...]
    places: Mapping[int, int]
    depth: int
    mixed: Mixtures | None = None
    expert_modules: tuple[str, ...] = ()
    states: Mapping[StateKey, StateForm] = field(default_factory=dict)
    state_modules: tuple[str, ...] = ()
    rotating_modules: tuple[str, ...] = ()

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """As `ModelSpec` says."""
        return {name: (shape[0], shape[1]) for name, shape in self.modules.items() if len(shape) == 2}

    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """As `ModelSpec` says."""
        shapes = dict(self.modules)
        if self.mixed is None:
            return shapes
        count, inner = self.mixed.num_experts, self.mixed.inner
        for name in self.expert_modules:
            for half in ("gate_proj", "up_proj"):
                shapes[f"{name}.{half}"] = count, self.hidden_size, inner
            shapes[f"{name}.gate_up_proj"] = count, self.hidden_size, 2, inner
            shapes[f"{name}.down_proj"] = count, inner, self.hidden_size
        return shapes

    def widths(self) -> Mapping[str, Mapping[str, int]]:
        """As `ModelSpec` says, for projections that are fused here or may be fused in an adapter."""
        return part_widths(self.modules)

    def state_bytes(self, element_bytes: int) -> int:
        """As `ModelSpec` says."""
        return sum(prod(form.shape) * (WIDE_BYTES if form.is_wide else element_bytes) for form in self.states.values())

    def mixtures(self) -> Mixtures | None:
        """As `ModelSpec` says."""
        return self.mixed

    def kv_shapes(self) -> tuple[KvShape, ...]:
        """As `ModelSpec` says."""
        return self.kv

    def num_model_layers(self) -> int:
        """As `ModelSpec` says."""
        return self.depth
