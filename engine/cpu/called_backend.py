"""CPU operations by our own compiled kernels, each called as needed: for models whose steps cannot be recorded.

Torch operators do what these kernels do not support, and small operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from engine.adapter_tables import ENTRIES
from engine.attention import AttentionBatch
from engine.backend import Backend, Product, RoutedExperts, StateKernels
from engine.cpu.called_lora import CalledLora
from engine.cpu.native_lora import PanelAdapter
from engine.cpu.panels import EMBED_BY_LOGITS, INT8_KERNEL, Panels, grouped_arguments, lay_out, lay_out_vocabulary
from engine.decoder.layer_forms import LayerForm
from engine.decoder.model_spec import ModelSpec
from engine.kv_cache import LayerCache
from engine.loading.weight import Weight
from engine.lora import AdapterSegment, HeadNorms, LoraProducts
from kernels.arena import Arena
from kernels.embedding.reference import take_rows
from kernels.experts.reference import max_groups
from kernels.gated_activation.reference import Activation
from kernels.gated_delta.reference import EPS
from kernels.native import SUFFIX_BY_DTYPE
from kernels.program import Pool
from kernels.state_rows import StateRows, token_stride


class SortedPairs(NamedTuple):
    """The (token, expert) pairs of a step, sorted by expert and grouped.

    Attributes:
        rows: token of each pair, int64 [pairs].
        places, weights: positions of each token's pairs, int32, and their weights, float32; [tokens, chosen].
        groups: (expert, first pair, number of pairs), int32 [groups, 3].
    """

    rows: torch.Tensor
    places: torch.Tensor
    weights: torch.Tensor
    groups: torch.Tensor
    num_experts: int


class CalledBackend(Backend):
    """A `Backend` for models that satisfy `engine.cpu.panels.can_attend`.

    Args:
        dtype: of weights, activations and cache.
        quantization: "int8" or "int4" to quantize linear layers, and the output matrix as `lay_out_vocabulary` does;
            None to keep each weight's format, 4-bit ones too.
        entries: of each layer in the table of an adapter laid out for our kernels, as in
            `engine.adapter_tables.entry_of`.
    """

    def __init__(
        self, pool: Pool, dtype: torch.dtype, quantization: str | None = None, entries: Sequence[str] = ENTRIES
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._quantization = quantization
        self._entries = entries
        self._arena = Arena()
        self._segments: tuple[torch.Tensor, torch.Tensor] | tuple[None, None] = (None, None)
        """Segments of adapters whose tables have entries for head norms, and their number."""

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Lay out the weight in panels. They hold inputs in pairs, so a weight with an odd number is left to torch."""
        if weight.shape[1] % 2:
            return super().linear(name, weight, bias)
        return partial(self._product, self._lay_out([weight], 1), name, bias)

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Lay out the output matrix in panels; a tied embedding reads its rows from the same panels."""
        matrix = embedding if head is None else head
        if matrix.shape[1] % 2:
            return super().vocabulary(embedding, head)
        panels = self._vocabulary(matrix, self._quantization)
        embed = partial(self._embed, panels) if head is None else partial(take_rows, embedding)
        return embed, partial(self._logits, panels)

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Apply adapters by our kernels if they are laid out for them."""
        if not all(isinstance(segment.weights, PanelAdapter) for segment in segments):
            return super().lora(segments, samples)
        return CalledLora(self._pool, self._dtype, self._entries, segments) if segments else None

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Add and norm in one pass."""
        if weight is None:
            return super().add_rms_norm(x, delta, weight, eps)
        h, width = torch.empty_like(x), x.shape[1]
        self._call("add_rms_norm", x, (x, delta, weight, h), (width, is_wide(weight), width), (eps,))
        return h

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Activate and multiply in one pass."""
        width = gate_up.shape[1] // 2
        out = self._like(gate_up, "gated", (width,))
        self._call(f"{activation}_and_multiply", gate_up, (gate_up, out), (width,))
        return out

    def attend(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: HeadNorms | None,
        eps: float,
        cache: LayerCache,
        batch: AttentionBatch,
        form: LayerForm,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Norm, rotate and write to the cache in one pass, then attend; both use the cache's panels in place."""
        block_tokens, kv_heads, head_dim = cache.k.shape[1:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = self._like(qkv, "queries", (heads, head_dim))
        entry = None if norms is None else norms.entry
        both = (None, None) if norms is None else (norms.q, norms.k)
        adapted = (None, None) if entry is None else self._segments
        sizes = (heads, kv_heads, head_dim, block_tokens)
        written = (qkv, cos_sin, *both, cache.k, cache.v, batch.slots, q, *adapted)
        turned = (cache.k.stride(0), is_wide(both[0]), form.rope.rotary_dim(head_dim), entry or 0)
        self._call("rope_kv_write", qkv, written, (*sizes, *turned), (eps,))
        out = self._like(q, "attended", (heads, head_dim))
        read = (q, cache.k, cache.v, batch.rows, batch.tables, out, sinks)
        told = (batch.tables.shape[1], cache.k.stride(0), form.window)
        self._call("paged_attention", batch.rows, read, (*sizes, *told), (form.scale, form.softcap))
        return out

    def routed_experts(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> RoutedExperts:
        """Lay out in panels, one expert after another; experts with an odd number of inputs are left to torch."""
        (count, _, hidden), inner = gate_up.shape, down.shape[2]
        if _are_odd(hidden, inner):
            return super().routed_experts(gate_up, down, activation)
        ups, downs = self._lay_out(gate_up, count), self._lay_out(down, count)

        def multiply(
            h: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            decodes: torch.Tensor | None,
            lora: LoraProducts | None = None,
            layer: int = 0,
        ) -> torch.Tensor:
            num_pairs, places = experts.numel(), experts.new_empty(experts.shape, dtype=torch.int32)
            rows, groups = experts.new_empty(num_pairs), places.new_empty(max_groups(num_pairs, count), 3)
            operands = experts.int().contiguous(), rows, places, groups, places.new_empty(count)
            self._call("sort_by_expert", experts, operands, (count, experts.shape[1]))
            change = None
            if isinstance(lora, CalledLora) and lora.has_experts:
                change = partial(lora.change_experts, rows=rows, groups=groups, layer=layer, num_experts=count)
            pairs = SortedPairs(rows, places, weights.float().contiguous(), groups, count)
            return self._mixed(h, pairs, (ups, downs), (None, None), activation, change)

        return multiply

    def state_kernels(self) -> StateKernels:
        """Return our compiled kernels; the host always finds the rows' states, so none is given `rows`."""
        functions = (partial(function, self._pool) for function in (_gated_delta, _causal_conv, _selective_scan))
        return StateKernels(frozenset(SUFFIX_BY_DTYPE), *functions)

    def _lay_out(self, matrices: Iterable[Weight], count: int) -> Panels:
        return lay_out(matrices, count, self._quantization, self._arena.empty, self._pool)

    def _vocabulary(self, matrix: torch.Tensor, quantization: str | None) -> Panels:
        return lay_out_vocabulary(matrix, quantization, self._arena.empty, self._pool)

    def _embed(self, panels: Panels, token_ids: torch.Tensor) -> torch.Tensor:
        out, (hidden, _, *group) = self._like(token_ids, "embedded", (panels.depth,)), panels.sizes
        self._call(EMBED_BY_LOGITS[panels.kernel], token_ids, (*panels.tensors, token_ids, out), (hidden, *group))
        return out

    def _logits(self, panels: Panels, h: torch.Tensor) -> torch.Tensor:
        logits = self._like(h, "logits", (panels.out,), torch.float32)
        self._call(panels.kernel, h, (h.contiguous(), *panels.tensors, None, logits), panels.sizes)
        return logits

    def _product(self, panels: Panels, name: str, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        y = self._like(x, name, (panels.out,))
        self._call(panels.kernel, x, (*self._inputs(panels, x), *panels.tensors, bias, y), panels.sizes)
        return y

    def _inputs(self, panels: Panels, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the kernel's inputs for `x`: quantized rows and their scales for an int8 kernel, else `x` itself."""
        if panels.kernel != INT8_KERNEL:
            return (x,)
        padded = panels.sizes[0]
        q, scales = self._like(x, "quantized", (padded,), torch.int8), self._like(x, "scales", (), torch.float32)
        self._call("quantize_rows", x, (x, q, scales), (panels.depth, padded))
        return q, scales

    def _mixed(
        self,
        h: torch.Tensor,
        pairs: SortedPairs,
        panels: tuple[Panels, Panels],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        activation: Activation,
        change: Callable[..., None] | None,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            panels, biases: of both products.
            change: as `CalledLora.change_experts`, with the first two arguments and `part` left open.
        """
        (ups, downs), (up_bias, down_bias) = panels, biases
        inputs = [self._paired(part, pairs.rows) for part in self._inputs(ups, h)]
        joint = self._grouped(ups, "experts", inputs, pairs, up_bias)
        if change is not None:
            change(h, joint, part="gate_up")
        gated = self.activate_and_multiply(joint, activation)
        parts = self._grouped(downs, "paired", self._inputs(downs, gated), pairs, down_bias)
        if change is not None:
            change(gated, parts, part="down")
        y = self._like(h, "mixed", (downs.out,))
        sizes = (downs.out, pairs.places.shape[1])
        self._call("add_experts", h, (parts, pairs.places, pairs.weights, y), sizes)
        return y

    def _grouped(
        self,
        panels: Panels,
        name: str,
        inputs: Sequence[torch.Tensor],
        pairs: SortedPairs,
        biases: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the product of each expert with the rows of its pairs."""
        y = self._like(pairs.rows, name, (panels.out,))
        arguments = grouped_arguments(panels, inputs, biases, y, pairs.groups, pairs.num_experts)
        self._call(f"grouped_{panels.kernel}", pairs.rows, *arguments)
        return y

    def _paired(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return a copy of rows of any dtype."""
        return x.index_select(0, rows)

    def _like(
        self, x: torch.Tensor, key: object, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return room for a result with one row for each row of `x`; `key` tells it from others of a layer."""
        return x.new_empty(x.shape[0], *shape, dtype=dtype or self._dtype)

    def _call(
        self,
        kernel: str,
        rows_of: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        """Call a kernel for each row of a tensor."""
        self._pool.call(kernel, self._dtype, rows_of.shape[0], tensors, sizes, numbers)


def _gated_delta(
    pool: Pool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    assert rows is None
    out = v.new_empty(v.shape)
    sizes = (*v.shape[1:3], *k.shape[2:], v.shape[3], *(token_stride(x) for x in (q, k, v)))
    pool.call("gated_delta", v.dtype, len(v), (q, k, v, g, beta, states, out), sizes, (EPS, k.shape[3] ** -0.5))
    return out


def _causal_conv(
    pool: Pool,
    x: torch.Tensor,
    states: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: StateRows | None = None,
    *,
    is_activated: bool = True,
) -> torch.Tensor:
    assert rows is None
    y = x.new_empty(x.shape)
    sizes = x.shape[1], *weight.shape, token_stride(x), int(is_activated)
    pool.call("causal_conv", x.dtype, len(x), (x, states, weight, bias, y), sizes)
    return y


def _selective_scan(
    pool: Pool,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    assert rows is None
    y = x.new_empty(x.shape)
    sizes = (*x.shape[1:], *b.shape[2:], *(token_stride(part) for part in (x, b, c)))
    pool.call("selective_scan", x.dtype, len(x), (x, dt, a, b, c, d, states, y), sizes)
    return y


def is_wide(norm: torch.Tensor | None) -> bool:
    """Return whether the weights of a norm are float32, whatever the dtype of activations."""
    return norm is not None and norm.dtype == torch.float32


def leaves_experts_to_torch(spec: ModelSpec) -> bool:
    """Return whether a model has experts that our kernels do not compute, nor their adapters."""
    mixtures = spec.mixtures()
    return mixtures is not None and _are_odd(spec.hidden_size, mixtures.inner)


def _are_odd(hidden: int, inner: int) -> bool:
    return bool(hidden % 2 or inner % 2)
