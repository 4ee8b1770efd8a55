"""The CPU's operations by our own compiled kernels, written down at the first call and run again at every step.

A decode step of a small model is mostly the calling of operators. Here the decoder runs once, over the runner's whole
buffers, and each operation appends itself to a `Program`; a step then is one call into C++. See `engine.cpu.recorded`.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from engine.attention import AttentionBatch
from engine.backend import Backend, LayerCache, Product
from engine.cpu.native_lora import NativeLora
from engine.decoder.decoder import DecoderBatch
from engine.decoder.layer_forms import LayerForm
from engine.decoder.spec import DecoderSpec
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, dense
from engine.lora import AdapterSegment, LoraProducts
from kernels.arena import Arena
from kernels.gated_activation.reference import Activation
from kernels.packed_linear.reference import LANES, as_panels
from kernels.packed_linear_int4.reference import beside_panels, to_int4_panels, to_levels
from kernels.packed_linear_int8.reference import padded_depth, quantize_rows, to_int8_panels
from kernels.program import Pool, Program


def can_run(spec: DecoderSpec, block_tokens: int) -> bool:
    """Return whether the kernels know this geometry: what a cache keeps in panels must fill them."""
    if spec.experts is not None:
        return False
    sizes = (spec.hidden_size, spec.q_size, spec.intermediate_size)
    return spec.head_dim % LANES == 0 and block_tokens % LANES == 0 and all(size % 2 == 0 for size in sizes)


def _is_wide(norm: torch.Tensor | None) -> bool:
    return norm is not None and norm.dtype == torch.float32


class NativeBackend(Backend):
    """A `Backend` that records. Tensors that it returns hold nothing until the program has run.

    Every result has a place of its own that the same operation of the next layer takes over, so that memory does not
    grow with the depth; the decoder reads each result before it makes the next one of its kind.

    Args:
        dtype: of weights, activations and cache.
        max_rank: the highest rank of an adapter.
        quantization: "int8" or "int4" for how linear layers are held and multiplied; None as they come, in 4 bits too.
    """

    def __init__(self, pool: Pool, dtype: torch.dtype, max_rank: int, *, quantization: str | None = None) -> None:
        self.program = Program(pool)
        self.counts = torch.zeros(6, dtype=torch.int64)
        """What a step has of tokens, rows, samples, and segments of adapters, as `NativeLora` counts them."""
        self.carried: dict[int, torch.Tensor] = {}
        """What lives across a pause, by address: each has a row for every token."""
        self._arena = Arena()
        self._dtype = dtype
        self._quantization = quantization
        self._tokens, self._rows, self._samples = (self.counts[i : i + 1] for i in range(3))
        self.adapters = NativeLora(self.program, dtype, max_rank, self.counts[3:])
        self._count_by_address: dict[int, torch.Tensor] = {}
        self._place_by_key: dict[tuple[object, ...], torch.Tensor] = {}

    def begin(self, whole: DecoderBatch) -> None:
        """Learn which inputs have a row for each token, and which for each sample."""
        self.know(whole.token_ids, whole.positions)
        self._count_by_address[whole.sampled.data_ptr()] = self._samples
        self.adapters.begin(len(whole.attention.rows), len(whole.token_ids))

    def know(self, *tensors: torch.Tensor) -> None:
        """Learn of inputs that have a row for each token."""
        for tensor in tensors:
            self._count_by_address[tensor.data_ptr()] = self._tokens

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Lay out in panels."""
        if self._quantization == "int8":
            return self._int8_linear(name, dense(weight), bias)
        if isinstance(weight, Int4Weight):
            return self._int4_linear(name, weight.levels, weight.scales.t().float(), weight.zeros.t(), bias)
        if self._quantization == "int4":
            return self._int4_linear(name, *to_levels(dense(weight)), bias)
        out, depth = weight.shape
        panels = self._panels(dense(weight))
        return lambda x: self._product("packed_linear", name, x, panels, bias, depth, out, self._dtype)

    def _int8_linear(self, name: str, weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
        out, depth = weight.shape
        padded = padded_depth(depth)
        int8, column_scales = quantize_rows(weight)
        panels = self._keep(to_int8_panels(int8))

        def multiply(x: torch.Tensor) -> torch.Tensor:
            q = self._like(x, "quantized", (padded,), torch.int8)
            scales = self._like(x, "scales", (), torch.float32)
            y = self._like(x, name, (out,))
            self._add("quantize_rows", x, (x, q, scales), (depth, padded))
            self._add("packed_linear_int8", x, (q, scales, panels, column_scales, bias, y), (padded, out))
            return y

        return multiply

    def _int4_linear(
        self, name: str, levels: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, bias: torch.Tensor | None
    ) -> Product:
        (out, depth), group = levels.shape, levels.shape[1] // scales.shape[1]
        panels = self._keep(to_int4_panels(levels))
        beside = (self._keep(beside_panels(scales)), self._keep(beside_panels(zeros.to(torch.uint8))))

        def multiply(x: torch.Tensor) -> torch.Tensor:
            y = self._like(x, name, (out,))
            self._add("packed_linear_int4", x, (x, panels, *beside, bias, y), (depth, out, group))
            return y

        return multiply

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Lay out in panels; rows of the embedding are picked out of them, so that a tied matrix is held once."""
        vocab, hidden = embedding.shape
        embedding_panels = self._panels(embedding)
        head_panels = embedding_panels if head is None else self._panels(head)

        def embed(token_ids: torch.Tensor) -> torch.Tensor:
            out = self._like(token_ids, "embedded", (hidden,))
            self._add("embed", token_ids, (embedding_panels, token_ids, out), (hidden,))
            return out

        return embed, lambda h: self._product(
            "packed_logits", "logits", h, head_panels, None, hidden, vocab, torch.float32
        )

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Record the products of whatever adapters a step will have."""
        return self.adapters

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Record a copy of rows; each call has a place of its own."""
        out = self._like(indices, ("taken", len(self._place_by_key)), x.shape[1:])
        self._add("take_rows", indices, (x, indices, out), (out[0].numel(),))
        self._carry(out)
        return out

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Record the sum and the norm, one pass; before it all that a layer hands on is in `carried`."""
        # What a part adds is normed as well: that is read when the next norm is written.
        h = x if weight is None else self._like(x, ("normed", x.data_ptr()), x.shape[1:])
        is_of_tokens = self._count_by_address[x.data_ptr()] is self._tokens
        sizes = (x.shape[1], _is_wide(weight), x.shape[1])
        self._add("add_rms_norm", x, (x, delta, weight, h), sizes, (eps,), may_pause=is_of_tokens)
        self._carry(x, delta)
        return h

    def norm_columns(self, x: torch.Tensor, start: int, weight: torch.Tensor, eps: float) -> None:
        """Record the norm, in place."""
        part, sizes = x[:, start:], (len(weight), _is_wide(weight), x.shape[1])
        self._add("add_rms_norm", x, (part, None, weight, part), sizes, (eps,))

    def attend(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cache: LayerCache,
        batch: AttentionBatch,
        form: LayerForm,
    ) -> torch.Tensor:
        """Record norm, rotation and write, one pass, and attention; both know the cache in panels, where it lies."""
        block_tokens, kv_heads, head_dim = cache.k.shape[1:]
        heads = qkv.shape[1] // head_dim - 2 * kv_heads
        q = self._like(qkv, "queries", (heads, head_dim))
        tensors = (qkv, cos_sin, *(norms or (None, None)), cache.k, cache.v, batch.slots, q)
        is_wide, rotary_dim = _is_wide(None if norms is None else norms[0]), form.rope.rotary_dim(head_dim)
        written = (heads, kv_heads, head_dim, block_tokens, cache.k.stride(0), is_wide, rotary_dim)
        self._add("rope_kv_write", qkv, tensors, written, (eps,))
        out = self._like(q, "attended", (heads, head_dim))
        sizes = (heads, kv_heads, head_dim, block_tokens, batch.tables.shape[1], cache.k.stride(0), form.window)
        read = (q, cache.k, cache.v, batch.rows, batch.tables, out)
        self.program.add("paged_attention", self._dtype, self._rows, read, sizes, (form.scale, form.softcap))
        return out

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Record the gate, one pass."""
        width = gate_up.shape[1] // 2
        out = self._like(gate_up, "gated", (width,))
        self._add(f"{activation}_and_multiply", gate_up, (gate_up, out), (width,))
        return out

    def rescale(self, x: torch.Tensor, factor: float, softcap: float = 0.0) -> None:
        """Record the change, in place."""
        count = self._count_by_address[x.data_ptr()]
        self.program.add("rescale", x.dtype, count, (x,), (x.shape[1],), (factor, softcap))

    def _product(
        self,
        kernel: str,
        name: str,
        x: torch.Tensor,
        panels: torch.Tensor,
        bias: torch.Tensor | None,
        depth: int,
        out: int,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        y = self._like(x, name, (out,), dtype)
        self._add(kernel, x, (x, panels, bias, y), (depth, out))
        return y

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
        """Return the place of a result that has a row for each of `x`."""
        count = self._count_by_address[x.data_ptr()]
        full = (key, count.data_ptr(), *shape)
        if full not in self._place_by_key:
            size = (x.shape[0], *shape)
            place = self._arena.empty(prod(size), dtype or self._dtype).view(size)
            if count is self._tokens:
                # Touched now: getting memory from the system would take longer than the first prompt's arithmetic.
                # Of samples a step mostly has few, and their logits are wider than all else.
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
