"""CPU operations by our own compiled kernels, recorded at the first call and replayed at every step.

Most of a small model's decode step is operator dispatch. Here the decoder runs once, over the runner's whole buffers,
and each operation appends itself to a `Program`; a step is then one call into C++. See `engine.cpu.recorded`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch

from adapters.peft_format import ROUTER
from engine.attention import AttentionBatch
from engine.backend import Backend, ExpertWeights, MixtureProduct, Product
from engine.cpu.native_lora import NativeLora
from engine.cpu.panels import INT8_KERNEL, Panels, can_attend, grouped_arguments, lay_out
from engine.decoder.decoder import DecoderBatch
from engine.decoder.experts import ExpertSpec
from engine.decoder.layer_forms import LayerForm
from engine.decoder.spec import DecoderSpec
from engine.kv_cache import LayerCache
from engine.loading.weight import Weight, split
from engine.lora import AdapterSegment, HeadNorms, LoraProducts
from kernels.arena import Arena
from kernels.experts.reference import Part, max_groups
from kernels.gated_activation.reference import Activation
from kernels.packed_linear.reference import as_panels
from kernels.program import Pool, Program


class Routing(NamedTuple):
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


def can_run(spec: DecoderSpec, block_tokens: int) -> bool:
    """Return whether the kernels support this geometry: the cache fills its panels, and all matrix sizes are even."""
    sizes = {spec.hidden_size, spec.q_size, *(size for shape in spec.linear_sizes() for size in shape)}
    return can_attend(spec, block_tokens) and all(size % 2 == 0 for size in sizes)


def _is_wide(norm: torch.Tensor | None) -> bool:
    return norm is not None and norm.dtype == torch.float32


class NativeBackend(Backend):
    """A `Backend` that records. The tensors that it returns hold no data until the program has run.

    Every result has its own buffer, which the same operation of the next layer reuses, so memory does not grow with
    depth. The decoder reads each result before it makes the next one of its kind.

    Args:
        dtype: of weights, activations and cache.
        max_rank: the highest rank of an adapter.
        quantization: "int8" or "int4" to quantize linear layers; None to keep each weight's format, 4-bit ones too.
    """

    def __init__(self, pool: Pool, dtype: torch.dtype, max_rank: int, *, quantization: str | None = None) -> None:
        self.program = Program(pool)
        self._pool = pool
        self.counts = torch.zeros(8, dtype=torch.int64)
        """Counts of the current step: tokens, rows, samples, the four segment counts of `NativeLora`, (token, expert)
        pairs."""
        self.carried: dict[int, torch.Tensor] = {}
        """Tensors that stay live across a pause, by address, with one row per token each."""
        self._arena = Arena()
        self._dtype = dtype
        self._quantization = quantization
        self._tokens, self._rows, self._samples, self._pairs = (self.counts[i : i + 1] for i in (0, 1, 2, 7))
        self.adapters = NativeLora(self.program, dtype, max_rank, self.counts[3:7])
        self.num_chosen = 0
        """How many experts the router chooses for each token, 0 for a model without experts."""
        self._count_by_address: dict[int, torch.Tensor] = {}
        self._place_by_key: dict[tuple[object, ...], torch.Tensor] = {}

    def begin(self, whole: DecoderBatch) -> None:
        """Register which inputs have one row per token, and which have one per sample."""
        self.know(whole.token_ids, whole.positions)
        self._count_by_address[whole.sampled.data_ptr()] = self._samples
        self.adapters.begin(len(whole.attention[0].rows), len(whole.token_ids))

    def know(self, *tensors: torch.Tensor) -> None:
        """Register inputs that have one row per token."""
        for tensor in tensors:
            self._count_by_address[tensor.data_ptr()] = self._tokens

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Lay out the weight in panels."""
        panels = self._lay_out([weight], 1)
        return lambda x: self._product(panels, name, x, bias)

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Lay out in panels. The embedding reads its rows from panels too, so a tied matrix is stored once."""
        vocab, hidden = embedding.shape
        embedding_panels = self._panels(embedding)
        head_panels = embedding_panels if head is None else self._panels(head)

        def embed(token_ids: torch.Tensor) -> torch.Tensor:
            out = self._like(token_ids, "embedded", (hidden,))
            self._add("embed", token_ids, (embedding_panels, token_ids, out), (hidden,))
            return out

        def to_logits(h: torch.Tensor) -> torch.Tensor:
            logits = self._like(h, "logits", (vocab,), torch.float32)
            self._add("packed_logits", h, (h, head_panels, None, logits), (hidden, vocab))
            return logits

        return embed, to_logits

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Return products that read each step's adapters when the recording is replayed."""
        return self.adapters

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Record a copy of rows; each call has its own buffer."""
        out = self._like(indices, ("taken", len(self._place_by_key)), x.shape[1:])
        self._add("take_rows", indices, (x, indices, out), (out[0].numel(),))
        self._carry(out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Record the sum and the norm in one pass. A step may pause before it: all live state is then in `carried`."""
        # One buffer per input: a sub-layer's output may be normed too, and is still read when the next norm is written.
        h = x if weight is None else self._like(x, ("normed", x.data_ptr()), x.shape[1:])
        is_of_tokens = self._count_by_address[x.data_ptr()] is self._tokens
        sizes = (x.shape[1], _is_wide(weight), x.shape[1])
        self._add("add_rms_norm", x, (x, delta, weight, h), sizes, (eps,), may_pause=is_of_tokens)
        self._carry(x, delta)
        return h

    def norm_columns(self, x: torch.Tensor, start: int, weight: torch.Tensor, eps: float) -> None:
        """Record the in-place norm."""
        part, sizes = x[:, start:], (len(weight), _is_wide(weight), x.shape[1])
        self._add("add_rms_norm", x, (part, None, weight, part), sizes, (eps,))

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
        """Record norm, rotation and cache write in one pass, then attention; both use the cache's panels in place."""
        block_tokens, kv_heads, head_dim = cache.k.shape[1:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = self._like(qkv, "queries", (heads, head_dim))
        entry = None if norms is None else norms.entry
        both = (None, None) if norms is None else (norms.q, norms.k)
        adapted = (None, None) if entry is None else self.adapters.whole
        tensors = (qkv, cos_sin, *both, cache.k, cache.v, batch.slots, q, *adapted)
        is_wide, rotary_dim = _is_wide(both[0]), form.rope.rotary_dim(head_dim)
        written = (heads, kv_heads, head_dim, block_tokens, cache.k.stride(0), is_wide, rotary_dim, entry or 0)
        self._add("rope_kv_write", qkv, tensors, written, (eps,))
        out = self._like(q, "attended", (heads, head_dim))
        sizes = (heads, kv_heads, head_dim, block_tokens, batch.tables.shape[1], cache.k.stride(0), form.window)
        read = (q, cache.k, cache.v, batch.rows, batch.tables, out, sinks)
        self.program.add("paged_attention", self._dtype, self._rows, read, sizes, (form.scale, form.softcap))
        return out

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Record activation and product in one pass."""
        width = gate_up.shape[1] // 2
        out = self._like(gate_up, "gated", (width,))
        self._add(f"{activation}_and_multiply", gate_up, (gate_up, out), (width,))
        return out

    def experts(self, weights: ExpertWeights, spec: ExpertSpec, activation: Activation) -> MixtureProduct:
        """Lay out in panels, one expert after another; record routing, products, activation and weighted sum."""
        router, gate_up, down, biases = weights
        self.num_chosen = spec.chosen
        to_logits = lay_out([router], 1, None, self._arena.empty, self._pool)
        router_bias, up_bias, down_bias = biases or (None, None, None)
        ups, downs = (self._lay_out(split(weight, spec.count), spec.count) for weight in (gate_up, down))

        def multiply(h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
            def logits(x: torch.Tensor) -> torch.Tensor:
                return self._product(to_logits, "router", x, router_bias)

            routing = self._route(self.adapters.multiply(logits, h, layer, (ROUTER,), (spec.count,)), spec)
            inputs = [self._take_bits(part, routing.rows) for part in self._inputs(ups, h)]
            joint = self._grouped(ups, "experts", inputs, routing, up_bias)
            self._change(h, joint, routing, layer, "gate_up")
            gated = self.activate_and_multiply(joint, activation)
            parts = self._grouped(downs, "paired", self._inputs(downs, gated), routing, down_bias)
            self._change(gated, parts, routing, layer, "down")
            y = self._like(h, "mixed", (downs.out,))
            self._add("add_experts", h, (parts, routing.places, routing.weights, y), (downs.out, spec.chosen))
            return y

        return multiply

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, delta: torch.Tensor) -> None:
        """Record the in-place sum."""
        self._add("add_gated", y, (y, x, gate, delta), (y.shape[1],))

    def rescale(self, x: torch.Tensor, factor: float, softcap: float = 0.0) -> None:
        """Record the in-place change."""
        count = self._count_by_address[x.data_ptr()]
        self.program.add("rescale", x.dtype, count, (x,), (x.shape[1],), (factor, softcap))

    def _lay_out(self, matrices: Iterable[Weight], count: int) -> Panels:
        return lay_out(matrices, count, self._quantization, self._arena.empty, self._pool)

    def _product(self, panels: Panels, name: str, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        y = self._like(x, name, (panels.out,))
        self._add(panels.kernel, x, (*self._inputs(panels, x), *panels.tensors, bias, y), panels.sizes)
        return y

    def _inputs(self, panels: Panels, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the kernel's inputs for `x`: quantized rows and their scales for an int8 kernel, else `x` itself."""
        if panels.kernel != INT8_KERNEL:
            return (x,)
        padded = panels.sizes[0]
        q = self._like(x, "quantized", (padded,), torch.int8)
        scales = self._like(x, "scales", (), torch.float32)
        self._add("quantize_rows", x, (x, q, scales), (panels.depth, padded))
        return q, scales

    def _route(self, logits: torch.Tensor, spec: ExpertSpec) -> Routing:
        """Record the router's choice: one (row, expert) pair for each expert chosen by a row."""
        num_pairs = len(logits) * spec.chosen
        shares = self._like(logits, "shares", (spec.count,), torch.float32)
        weights = self._like(logits, "weights", (spec.chosen,), torch.float32)
        names, places = (self._like(logits, key, (spec.chosen,), torch.int32) for key in ("chosen", "places"))
        rows = self._place("rows of pairs", self._pairs, (num_pairs,), torch.int64)
        groups = self._place("groups", self._pairs, (max_groups(num_pairs, spec.count), 3), torch.int32)
        starts = self._place("starts", self._pairs, (spec.count,), torch.int32)
        sizes = (spec.count, spec.chosen)
        self._add("choose_experts", logits, (logits, shares, names, weights), (*sizes, spec.is_normed))
        self._add("sort_by_expert", logits, (names, rows, places, groups, starts), sizes)
        return Routing(rows=rows, places=places, weights=weights, groups=groups, num_experts=spec.count)

    def _grouped(
        self,
        panels: Panels,
        name: str,
        inputs: Sequence[torch.Tensor],
        routing: Routing,
        biases: torch.Tensor | None,
    ) -> torch.Tensor:
        """Record the product of each expert with the rows of its pairs."""
        y = self._like(routing.rows, name, (panels.out,))
        arguments = grouped_arguments(panels, inputs, biases, y, routing.groups, routing.num_experts)
        self._add(f"grouped_{panels.kernel}", routing.rows, *arguments)
        return y

    def _change(self, x: torch.Tensor, y: torch.Tensor, routing: Routing, layer: int, part: Part) -> None:
        """Record the adapters' part of a product of a layer's experts."""
        self.adapters.change_experts(
            x,
            y,
            routing.rows,
            routing.groups,
            self._pairs,
            layer=layer,
            num_experts=routing.num_experts,
            part=part,
        )

    def _take_bits(self, x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Record a copy of rows of any dtype as 4-byte words; a row's size in bytes is a multiple of 4."""
        out = self._like(rows, "paired", x.shape[1:], x.dtype)
        width = x.stride(0) * x.element_size() // 4
        self.program.add("take_rows", torch.float32, self._pairs, (x, rows, out), (width,))
        return out

    def _carry(self, *tensors: torch.Tensor | None) -> None:
        for tensor in tensors:
            if tensor is not None and self._count_by_address[tensor.data_ptr()] is self._tokens:
                self.carried[tensor.data_ptr()] = tensor

    def _panels(self, weight: torch.Tensor) -> torch.Tensor:
        return self._keep(as_panels(weight))

    def _keep(self, laid_out: torch.Tensor) -> torch.Tensor:
        return self._arena.empty(laid_out.numel(), laid_out.dtype).view(laid_out.shape).copy_(laid_out)

    def _like(
        self, x: torch.Tensor, key: object, shape: Sequence[int], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Return the buffer of a result with one row for each row of `x`."""
        return self._place(key, self._count_by_address[x.data_ptr()], (x.shape[0], *shape), dtype or self._dtype)

    def _place(self, key: object, count: torch.Tensor, size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        full = (key, count.data_ptr(), dtype, *size)
        if full not in self._place_by_key:
            place = self._arena.empty(prod(size), dtype).view(size)
            if count is not self._samples:
                # Touch the pages now: faulting them in would take longer than the first prompt's arithmetic.
                # Not those of samples: a step mostly has few, and their logits are wider than all else.
                place.zero_()
            self._place_by_key[full] = place
            self._count_by_address[place.data_ptr()] = count
        return self._place_by_key[full]

    def _add(
        self,
        kernel: str,
        rows_of: torch.Tensor,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
        *,
        may_pause: bool = False,
    ) -> None:
        count = self._count_by_address[rows_of.data_ptr()]
        self.program.add(kernel, self._dtype, count, tensors, sizes, numbers, may_pause=may_pause)
