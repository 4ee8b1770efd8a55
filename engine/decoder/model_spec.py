"""What the engine knows of a decoder, whoever computes it: what its cache holds, its context, its modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

from engine.cache.layout import CacheLayout
from engine.decoder.layer_forms import LayerForm
from engine.decoder.stored import Stored

SPAN_BYTES = 4
"""Of what a key or a value of one head spans (`kernels.row_quantization.reference`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """Geometry of one decoder-only transformer.

    Attributes:
        layers: what differs from layer to layer.
        is_tied: the output matrix is the embedding, or there is none.
        generates: there is one; else only vectors are made.
        max_position: context length in tokens that the checkpoint was made for, or as far as its attention is plain and
            its angles stay what they are.
        eos_ids: token ids that end a generation.
        stored: how the layers' linear weights lie in the checkpoint where they have 4 or 8 bits, else None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerForm, ...]
    is_tied: bool
    max_position: int
    eos_ids: tuple[int, ...]
    stored: Stored | None = None
    generates: bool = True

    @property
    def num_layers(self) -> int:
        """How many layers have keys and values."""
        return len(self.layers)

    def num_model_layers(self) -> int:
        """Return how many layers there are, those included that keep a state instead of keys."""
        return self.num_layers

    def state_bytes(self, element_bytes: int) -> int:
        """Return what layers keep of a text, however long it is, instead of keys or beside them."""
        return 0

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads together."""
        return self.num_kv_heads * self.head_dim

    def cache_layout(self, max_model_len: int) -> CacheLayout:
        """Return which layers share blocks of the KV cache, for texts of up to so many tokens."""
        return CacheLayout.of([form.within(max_model_len).window for form in self.layers])

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the bytes that one token takes in the KV cache; with one byte a number, what each head spans too."""
        span_bytes = SPAN_BYTES * self.num_kv_heads if element_bytes == 1 else 0
        return self.num_layers * 2 * (self.kv_size * element_bytes + span_bytes)

    @abstractmethod
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) features of every linear module of the layers, by its name."""

    def adapted_shapes(self) -> dict[str, tuple[int, int]]:
        """Return those that take an adapter."""
        return self.linear_shapes()

    def linear_sizes(self) -> set[tuple[int, int]]:
        """Return (in, out) of every product with a linear module, or one of an expert, that there is."""
        return set(self.linear_shapes().values())

    @abstractmethod
    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return what of the model takes an adapter, as `adapters.validate.ModuleShapes` says."""

    @abstractmethod
    def widths(self) -> Mapping[str, Mapping[str, int]]:
        """Return the outputs of the modules that read the same input, by the names of the projections they make up."""
