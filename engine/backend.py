"""The decoder operations that differ between devices: here in torch operators, which devices override by kernels.

Before them: what they take of a checkpoint, and what they return to be called at every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from adapters.tensor_names import ROUTER
from engine.attention import AttentionBatch, Chunk, DecodeGroup
from engine.cpu.linear import Linear
from engine.decoder.experts import ExpertSpec
from engine.decoder.layer_forms import LayerForm
from engine.kv_cache import LayerCache
from engine.loading.weight import Weight, dense
from engine.lora import AdapterSegment, HeadNorms, LoraBatch, LoraProducts
from kernels.add_rms_norm.reference import add_rms_norm
from kernels.embedding.reference import take_rows
from kernels.experts.reference import Change, choose_experts, multiply_by_experts
from kernels.gated_activation.reference import Activation, activate_and_multiply
from kernels.gated_sum.reference import add_gated
from kernels.rescale.reference import rescale
from kernels.rope_kv_write.reference import rope_kv_write

Product = Callable[[torch.Tensor], torch.Tensor]
"""Multiplies [tokens, in], contiguous, by weights that it owns and returns [tokens, out]."""


class ExpertWeights(NamedTuple):
    """The weights of a layer's mixture of experts as the checkpoint stores them.

    Attributes:
        router: [experts, hidden], never quantized.
        gate_up: [experts, 2 * inner, hidden], or if quantized [experts * 2 * inner, hidden] with the experts' rows
            stacked. `engine.loading.weight.split` splits either by expert.
        down: likewise [experts, hidden, inner].
        biases: of the router [experts], of gate and up [experts, 2 * inner], and of down [experts, hidden]; None for
            none.
    """

    router: torch.Tensor
    gate_up: Weight
    down: Weight
    biases: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None


class MixtureProduct(Protocol):
    """A layer's mixture of experts."""

    def __call__(self, h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
        """Return the residual update [tokens, hidden], a new tensor, for normalized states `h` [tokens, hidden].

        Args:
            lora: as returned by `Backend.lora`; its adapters' matrices for experts of the layer are applied.
        """
        ...


class RoutedExperts(Protocol):
    """A layer's experts, without a router."""

    def __call__(
        self,
        h: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        decodes: torch.Tensor | None,
        lora: LoraProducts | None = None,
        layer: int = 0,
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [tokens, hidden].

        Args:
            h: [tokens, hidden], contiguous.
            experts: integers [tokens, chosen], different ones for each token.
            weights: floats [tokens, chosen].
            decodes: the leading single-token rows of a step, as in `engine.attention.AttentionBatch.rows`; rows of no
                tokens pad a recorded step, and what is returned for them is undefined. None if all rows are tokens.
            lora, layer: as in `MixtureProduct`.
        """
        ...


class StateKernels(NamedTuple):
    """The kernels of a device for layers that keep states, which replace functions of transformers.

    They have the arguments of `kernels.gated_delta.launch`, `.causal_conv.launch` and `.selective_scan.launch`.

    Attributes:
        dtypes: which they support, for all arguments and results that are not said to be float32.
    """

    dtypes: frozenset[torch.dtype]
    gated_delta: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]


class Backend:
    """The operations that every decoder needs, on one device that holds all tensors.

    Attention gathers each row's blocks and calls torch's fused kernel.
    """

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Lay out a layer's weight [out, in] and bias in the device's format: for oneDNN, if that is faster.

        Takes ownership of the weight. Names are unique within a layer.
        """
        return Linear(dense(weight), bias)

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Lay out the embedding [vocab, hidden] and the output matrix (None if tied). Takes ownership of both.

        Returns:
            One from token ids [tokens] to rows [tokens, hidden] of the embedding, a new tensor that may be modified;
            one from hidden states to logits in float32.
        """
        multiply = Linear(embedding if head is None else head)
        return lambda token_ids: take_rows(embedding, token_ids), lambda h: multiply(h).float()

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Return what applies a step's adapters, given the segments of its tokens and samples; None for none."""
        return LoraBatch(segments, samples) if segments else None

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows [len(indices), ...] of `x`."""
        return take_rows(x, indices)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Add `delta` to `x` in place and normalize the sum, as `kernels.add_rms_norm.reference` defines."""
        return add_rms_norm(x, delta, weight, eps)

    def norm_columns(self, x: torch.Tensor, start: int, weight: torch.Tensor, eps: float) -> None:
        """Normalize columns `start` to `start + len(weight)` of `x` [tokens, any] in place."""
        part = x[:, start : start + len(weight)]
        part.copy_(add_rms_norm(part, None, weight, eps))

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
        """Write keys and values as `kernels.rope_kv_write.reference` defines, and attend as `kernels.paged_attention`.

        Slots of a row's last block past its own position may be read and must hold finite numbers, since zero times NaN
        is NaN; `KvCache.clear` ensures this. No other slot outside a row's positions is read.

        Args:
            sinks: attention sinks, float32 [heads]; None if the layer has none.

        Returns:
            [tokens, heads, head_dim].
        """
        q = rope_kv_write(
            qkv=qkv,
            cos_sin=cos_sin,
            norms=None if norms is None else (norms.q, norms.k),
            eps=eps,
            k_cache=cache.k,
            v_cache=cache.v,
            slots=batch.slots,
            rotary_dim=form.rope.rotary_dim(cache.k.shape[-1]),
        )
        out = torch.empty_like(q)
        decodes, chunks = batch.gathered
        for group in decodes:
            self._attend_decodes(q, cache, group, form, sinks, out)
        for chunk in chunks:
            own = q[chunk.start : chunk.end]
            out[chunk.start : chunk.end] = self._attend_chunk(own, cache, chunk, form, sinks)
        return out

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Return a(first half) * second half along the last dimension."""
        return activate_and_multiply(gate_up, activation)

    def state_kernels(self) -> StateKernels | None:
        """Return the kernels for layers that keep states; None for none."""
        return None

    def experts(self, weights: ExpertWeights, spec: ExpertSpec, activation: Activation) -> MixtureProduct:
        """Lay out a layer's mixture of experts, as `kernels.experts.reference` defines it. Takes ownership."""
        router, gate_up, down, biases = weights
        to_logits = Linear(router, None if biases is None else biases[0])
        ups, downs = (dense(weight).view(spec.count, -1, weight.shape[-1]) for weight in (gate_up, down))

        def multiply(h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
            logits = to_logits(h) if lora is None else lora.multiply(to_logits, h, layer, (ROUTER,), (spec.count,))
            experts, shares = choose_experts(logits, spec.chosen, is_normed=spec.is_normed)
            change = _expert_change(lora, layer)
            return multiply_by_experts(h, experts, shares, ups, downs, activation, biases and biases[1:], change)

        return multiply

    def routed_experts(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> RoutedExperts:
        """Lay out the experts of a layer that routes tokens by itself. Takes ownership.

        Args:
            gate_up, down: as in `ExpertWeights`, never quantized yet.
        """

        def multiply(
            h: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            decodes: torch.Tensor | None,
            lora: LoraProducts | None = None,
            layer: int = 0,
        ) -> torch.Tensor:
            change = _expert_change(lora, layer)
            return multiply_by_experts(h, experts, weights, gate_up, down, activation, None, change)

        return multiply

    def add_gated(self, y: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, delta: torch.Tensor) -> None:
        """Add `delta`, gated by `x`, to `y` in place, as `kernels.gated_sum.reference` defines."""
        add_gated(y, x, gate, delta)

    def rescale(self, x: torch.Tensor, factor: float, softcap: float = 0.0) -> None:
        """Scale and soft-cap `x` in place, as `kernels.rescale.reference` defines."""
        rescale(x, factor, softcap)

    def normed(
        self,
        product: Product,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Return `product` of the result of `add_rms_norm`, passed through a gated `activation` if one is given."""
        y = product(self.add_rms_norm(x, delta, weight, eps))
        return y if activation is None else self.activate_and_multiply(y, activation)

    def added(self, product: Product, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Return the residual update `product(h)`, or None if it was added to `x` in place."""
        return product(h)

    def _attend_decodes(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        group: DecodeGroup,
        form: LayerForm,
        sinks: torch.Tensor | None,
        out: torch.Tensor,
    ) -> None:
        rows, (_, heads, head_dim) = len(group.tokens), q.shape
        kv_heads = cache.k.shape[2]
        k, v = (
            # [rows, kv_heads, slots, head_dim]
            part.index_select(0, group.tables.flatten()).view(rows, -1, kv_heads, head_dim).transpose(1, 2)
            for part in (cache.k, cache.v)
        )
        # Query heads that share a kv head are passed as its query positions, so that no key is repeated.
        grouped = q.index_select(0, group.tokens).view(rows, kv_heads, heads // kv_heads, head_dim)
        by_position = None if sinks is None else sinks.view(kv_heads, 1, -1)
        attended = _attend(grouped, k, v, group.seen(form.window), form, by_position)
        out.index_copy_(0, group.tokens, attended.reshape(rows, heads, head_dim))

    def _attend_chunk(
        self, q: torch.Tensor, cache: LayerCache, chunk: Chunk, form: LayerForm, sinks: torch.Tensor | None
    ) -> torch.Tensor:
        k, v = (
            # [kv_heads, num_context, head_dim]
            part.index_select(0, chunk.table).flatten(0, 1)[: chunk.num_context].transpose(0, 1)
            for part in (cache.k, cache.v)
        )
        parts = (q.transpose(0, 1).unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0))
        by_head = None if sinks is None else sinks.view(cache.k.shape[2], -1, 1)
        return _attend(*parts, chunk.seen(form.window), form, by_head)[0].transpose(0, 1)


def _expert_change(lora: LoraProducts | None, layer: int) -> Change | None:
    """Return what changes the products of a layer's experts, by torch's operators; None if nothing does."""
    return partial(lora.change_expert, layer) if isinstance(lora, LoraBatch) and lora.has_experts else None


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    form: LayerForm,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend with queries [rows, heads, queries, head_dim]; without a mask attention is causal.

    Args:
        sinks: [kv_heads, query heads per kv head or 1, queries or 1].
    """
    if not form.softcap and sinks is None:
        is_shared = q.shape[1] > k.shape[1]
        plain: torch.Tensor = functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=form.scale, enable_gqa=is_shared
        )
        return plain
    if mask is None:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril()
    grouped = q.unflatten(1, (k.shape[1], -1))  # [rows, kv_heads, group, queries, head_dim]
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)).float()
    rescale(scores, form.scale, form.softcap)
    scores = scores.masked_fill(~mask.unsqueeze(-3), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.unsqueeze(-1).expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(-1)[..., : k.shape[2]]
    attended: torch.Tensor = weights.to(v.dtype) @ v.unsqueeze(2)
    return attended.flatten(1, 2)
