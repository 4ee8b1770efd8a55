"""CPU operations by our own compiled kernels, each called as needed: for models whose steps cannot be recorded.

Torch operators do what these kernels do not support, and small operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import torch

from engine.attention import AttentionBatch
from engine.backend import Backend, Product, RoutedExperts
from engine.cpu.called_lora import CalledLora
from engine.cpu.called_states import CalledStates
from engine.cpu.native_lora import PanelAdapter
from engine.cpu.panels import INT8_KERNEL, Panels, grouped_arguments, lay_out
from engine.decoder.layer_forms import LayerForm
from engine.decoder.model_spec import ModelSpec
from engine.kv_cache import LayerCache
from engine.loading.weight import Weight
from engine.lora import ENTRIES, AdapterSegment, HeadNorms, LoraProducts
from kernels.arena import Arena
from kernels.embedding.reference import take_rows
from kernels.experts.reference import max_groups
from kernels.gated_activation.reference import Activation
from kernels.packed_linear_int4.reference import GROUPS
from kernels.program import Pool


class CalledBackend(Backend):
    """A `Backend` for models that satisfy `engine.cpu.panels.can_attend`.

    Args:
        dtype: of weights, activations and cache.
        quantization: as in `engine.cpu.native_backend.NativeBackend`; weights of unsuitable shape are not quantized.
        entries: of each layer in the table of an adapter laid out for our kernels, as in `engine.lora.entry_of`.
    """

    def __init__(
        self, pool: Pool, dtype: torch.dtype, quantization: str | None = None, entries: Sequence[str] = ENTRIES
    ) -> None:
        self._pool = pool
        self._dtype = dtype
        self._quantization = quantization
        self._entries = entries
        self._arena = Arena()

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Lay out the weight in panels. They hold inputs in pairs, so a weight with an odd number is left to torch."""
        if weight.shape[1] % 2:
            return super().linear(name, weight, bias)
        return partial(self._product, self._lay_out([weight], 1, weight.shape[1]), bias)

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Lay out the output matrix in panels; a tied embedding reads its rows from the same panels."""
        matrix = embedding if head is None else head
        vocab, hidden = matrix.shape
        if hidden % 2:
            return super().vocabulary(embedding, head)
        (panels,) = lay_out([matrix], 1, None, self._arena.empty, self._pool).tensors

        def embed(token_ids: torch.Tensor) -> torch.Tensor:
            out = torch.empty(len(token_ids), hidden, dtype=self._dtype)
            self._call("embed", len(token_ids), (panels, token_ids, out), (hidden,))
            return out

        def to_logits(h: torch.Tensor) -> torch.Tensor:
            logits = h.new_empty(h.shape[0], vocab, dtype=torch.float32)
            self._call("packed_logits", h.shape[0], (h.contiguous(), panels, None, logits), (hidden, vocab))
            return logits

        return embed if head is None else partial(take_rows, embedding), to_logits

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
        h, (rows, width) = torch.empty_like(x), x.shape
        sizes = (width, weight.dtype is torch.float32, width)
        self._call("add_rms_norm", rows, (x, delta, weight, h), sizes, (eps,))
        return h

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Activate and multiply in one pass."""
        rows, width = gate_up.shape
        out = gate_up.new_empty(rows, width // 2)
        self._call(f"{activation}_and_multiply", rows, (gate_up, out), (width // 2,))
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
        """Write keys and values into the cache's panels, and attend to them in place."""
        assert norms is None, "whoever computes a model by modules of its own norms heads itself"
        block_tokens, kv_heads, head_dim = cache.k.shape[1:]
        tokens, heads = qkv.shape[0], qkv.shape[1] // head_dim - 2 * kv_heads
        q = qkv.new_empty(tokens, heads, head_dim)
        sizes = (heads, kv_heads, head_dim, block_tokens)
        written = (qkv, cos_sin, None, None, cache.k, cache.v, batch.slots, q)
        turned = (cache.k.stride(0), False, form.rope.rotary_dim(head_dim))
        self._call("rope_kv_write", tokens, written, (*sizes, *turned), (eps,))
        out = torch.empty_like(q)
        read = (q, cache.k, cache.v, batch.rows, batch.tables, out, sinks)
        told = (batch.tables.shape[1], cache.k.stride(0), form.window)
        self._call("paged_attention", batch.rows.shape[0], read, (*sizes, *told), (form.scale, form.softcap))
        return out

    def routed_experts(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> RoutedExperts:
        """Lay out in panels, one expert after another; experts with an odd number of inputs are left to torch."""
        (count, _, hidden), inner = gate_up.shape, down.shape[2]
        if _are_odd(hidden, inner):
            return super().routed_experts(gate_up, down, activation)
        ups, downs = self._lay_out(gate_up, count, hidden), self._lay_out(down, count, inner)

        def multiply(
            h: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            decodes: torch.Tensor | None,
            lora: LoraProducts | None = None,
            layer: int = 0,
        ) -> torch.Tensor:
            (num_rows, chosen), num_pairs = experts.shape, experts.numel()
            places, rows = experts.new_empty(num_rows, chosen, dtype=torch.int32), experts.new_empty(num_pairs)
            groups = places.new_empty(max_groups(num_pairs, count), 3)
            pairs = experts.int().contiguous(), rows, places, groups, places.new_empty(count)
            self._call("sort_by_expert", num_rows, pairs, (count, chosen))
            paired = [part.index_select(0, rows) for part in self._inputs(ups, h)]
            joint = self._grouped(ups, paired, groups, count)
            change = None
            if isinstance(lora, CalledLora) and lora.has_experts:
                change = partial(lora.change_experts, rows=rows, groups=groups, layer=layer, num_experts=count)
                change(h, joint, part="gate_up")
            gated = self.activate_and_multiply(joint, activation)
            parts, y = self._grouped(downs, self._inputs(downs, gated), groups, count), torch.empty_like(h)
            if change is not None:
                change(gated, parts, part="down")
            self._call("add_experts", num_rows, (parts, places, weights.float().contiguous(), y), (hidden, chosen))
            return y

        return multiply

    def state_kernels(self) -> CalledStates:
        """Return our compiled kernels."""
        return CalledStates(self._pool)

    def _lay_out(self, matrices: Iterable[Weight], count: int, depth: int) -> Panels:
        quantization = self._quantization
        if quantization == "int4" and depth % min(GROUPS):
            quantization = None
        return lay_out(matrices, count, quantization, self._arena.empty, self._pool)

    def _product(self, panels: Panels, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
        y = x.new_empty(x.shape[0], panels.out)
        self._call(panels.kernel, x.shape[0], (*self._inputs(panels, x), *panels.tensors, bias, y), panels.sizes)
        return y

    def _inputs(self, panels: Panels, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the kernel's inputs for `x`: quantized rows and their scales for an int8 kernel, else `x` itself."""
        if panels.kernel != INT8_KERNEL:
            return (x,)
        padded = panels.sizes[0]
        q, scales = x.new_empty(len(x), padded, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32)
        self._call("quantize_rows", len(x), (x, q, scales), (panels.depth, padded))
        return q, scales

    def _grouped(
        self, panels: Panels, inputs: Sequence[torch.Tensor], groups: torch.Tensor, count: int
    ) -> torch.Tensor:
        """Return the product of each of `count` experts with the rows of its pairs."""
        y = inputs[0].new_empty(len(inputs[0]), panels.out, dtype=self._dtype)
        self._call(f"grouped_{panels.kernel}", len(y), *grouped_arguments(panels, inputs, None, y, groups, count))
        return y

    def _call(
        self,
        kernel: str,
        count: int,
        tensors: Sequence[torch.Tensor | None],
        sizes: Sequence[int],
        numbers: Sequence[float] = (),
    ) -> None:
        self._pool.call(kernel, self._dtype, count, tensors, sizes, numbers)


def leaves_experts_to_torch(spec: ModelSpec) -> bool:
    """Return whether a model has experts that our kernels do not compute, nor their adapters."""
    mixtures = spec.mixtures()
    return mixtures is not None and _are_odd(spec.hidden_size, mixtures.inner)


def _are_odd(hidden: int, inner: int) -> bool:
    return bool(hidden % 2 or inner % 2)
