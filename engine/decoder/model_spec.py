"""Geometry of a decoder, whichever implementation computes it: KV cache contents, context length, modules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

from engine.cache.layout import CacheLayout
from engine.decoder.layer_forms import LayerForm
from engine.decoder.stored import Stored

SPAN_BYTES = 4
"""Size of the span (scale) of one head's quantized key or value (`kernels.row_quantization.reference`)."""


class KvShape(NamedTuple):
    """How many key heads a layer has, and the dimensions of each; values have as many."""

    heads: int
    dim: int


class Mixtures(NamedTuple):
    """The mixtures of experts of a model.

    Attributes:
        num_layers: how many layers have one.
        num_experts, chosen: experts of a layer, and those that compute a token.
        inner: intermediate size of an expert.
    """

    num_layers: int
    num_experts: int
    chosen: int
    inner: int


def cache_width(shapes: Sequence[KvShape]) -> int:
    """Return how wide a token's keys (or values) are in the cache, the same for all layers: the widest fits.

    It is a whole number of any layer's heads, because the kernels address tokens by heads.
    """
    multiple = lcm(*(shape.dim for shape in shapes))
    return max(-(-shape.heads * shape.dim // multiple) * multiple for shape in shapes)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec(ABC):
    """Geometry of one decoder-only transformer.

    Attributes:
        num_heads, num_kv_heads, head_dim: the most of any layer.
        layers: per-layer differences, one entry for each layer with keys and values.
        is_tied: the output matrix is the embedding, or there is no output matrix.
        generates: there is an output matrix; otherwise the model only produces embedding vectors.
        max_position: context length in tokens: what the checkpoint was made for, cut to where attention is plain and
            rotary angles do not change.
        eos_ids: token ids that end a generation.
        stored: layout of the layers' 4-bit or 8-bit linear weights in the checkpoint, None if not quantized.
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
        """Number of layers that have keys and values."""
        return len(self.layers)

    def mixtures(self) -> Mixtures | None:
        """Return the mixtures of experts, None if there are none, or if they are not known."""
        return None

    def num_model_layers(self) -> int:
        """Return the number of layers, including those that keep a recurrent state instead of keys and values."""
        return self.num_layers

    def state_bytes(self, element_bytes: int) -> int:
        """Return the bytes of recurrent state per sequence, of any length; layers keep it instead of or beside keys."""
        return 0

    @property
    def q_size(self) -> int:
        """Total width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of a token's keys (or values) in the cache of a layer."""
        return cache_width(self.kv_shapes())

    def kv_shapes(self) -> tuple[KvShape, ...]:
        """Return the key heads of each layer."""
        return (KvShape(self.num_kv_heads, self.head_dim),) * self.num_layers

    def cache_layout(self, max_model_len: int) -> CacheLayout:
        """Return which layers share KV cache blocks, for sequences of up to `max_model_len` tokens."""
        return CacheLayout.of([form.within(max_model_len).window for form in self.layers])

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """Return the KV cache bytes per token; one-byte elements come with a span for each head."""
        span_bytes = SPAN_BYTES * self.num_kv_heads if element_bytes == 1 else 0
        return self.num_layers * 2 * (self.kv_size * element_bytes + span_bytes)

    @abstractmethod
    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return (in, out) features of every linear module of the layers, by name."""

    def adapted_shapes(self) -> dict[str, tuple[int, int]]:
        """Return the linear modules that take an adapter, as `linear_shapes`."""
        return self.linear_shapes()

    @abstractmethod
    def module_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of everything that takes an adapter, as `adapters.validate.ModuleShapes`."""

    @abstractmethod
    def widths(self) -> Mapping[str, Mapping[str, int]]:
        """Return the output width of each module that reads a shared input, by fused projection and module name."""
