"""GPU operations: our Triton kernels, and the vendor's library for dense products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.tensor_names import ROUTER
from engine.attention import AttentionBatch
from engine.backend import Backend, ExpertWeights, MixtureProduct, Product, RoutedExperts, StateKernels
from engine.decoder.experts import ExpertSpec
from engine.decoder.layer_forms import LayerForm
from engine.gpu.adapters import AdapterScope, TritonLora
from engine.gpu.experts import change_of, laid_out
from engine.gpu.rounding import InputRounding
from engine.gpu.streamed_linear import StreamedLinear
from engine.kv_cache import LayerCache
from engine.loading.weight import Weight
from engine.lora import AdapterSegment, HeadNorms, LoraProducts
from engine.resolve import FP8_MULTIPLE, INT4_MULTIPLE_BY_DEVICE
from kernels.add_rms_norm.launch import add_rms_norm
from kernels.causal_conv.launch import causal_conv
from kernels.embedding.launch import take_rows
from kernels.experts.launch import multiply_by_chosen, multiply_by_experts
from kernels.experts.routing import counters as expert_counters
from kernels.gated_activation.reference import Activation
from kernels.gated_delta.launch import gated_delta
from kernels.paged_attention.launch import counters, paged_attention
from kernels.rope_attention.launch import can_attend, rope_attention
from kernels.rope_kv_write.launch import rope_kv_write
from kernels.selective_scan.launch import selective_scan

JOINS_ARE_WANTED = True
"""Whether to use fused kernels; `loadtest.gpu` turns it off to measure their gain."""


STATE_KERNELS = StateKernels(
    frozenset({torch.float32, torch.bfloat16, torch.float16}), gated_delta, causal_conv, selective_scan
)


class TritonBackend(Backend):
    """A `Backend` on a GPU. Attention reads no slot past a row's own positions, so blocks need not be cleared.

    Args:
        adapters: the products of the current step; its owner fills it before each step.
        max_samples: rows of the logits buffer; a step with more, of prompts or drafts, allocates its own.
        quantization: "fp8": quantize the layers' weights and inputs to 8-bit floats; "int4": quantize the weights only,
            unless they are 4-bit already; None: neither. Adapters read unquantized inputs.
        is_mixed: leave dense weights unquantized: the checkpoint's other weights are stored quantized already.

    Attributes:
        linears: products for which `engine.gpu.streamed_linear.measure` chooses the kernel.
        logits: buffer of `vocabulary`, float32 [max_samples, vocab]; None before that.
    """

    def __init__(
        self, adapters: TritonLora, max_samples: int, quantization: str | None = None, *, is_mixed: bool = False
    ) -> None:
        self.adapters = adapters
        self._max_samples = max_samples
        self._arrived = counters(adapters.device)
        self.linears: list[StreamedLinear] = []
        self.logits: torch.Tensor | None = None
        self._quantization = quantization
        self._is_mixed = is_mixed
        self._decodes: torch.Tensor | None = None
        self._rounding = InputRounding(is_wanted=quantization == "fp8")

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Keep the weight, quantized if configured."""
        product = StreamedLinear(
            weight,
            bias,
            quantization=self._quantization_of(weight),
            is_gate_up=name == "gate_up",
            is_after_norm=name in ("qkv", "gate_up"),
            rounding=self._rounding,
        )
        self.linears.append(product)
        return product

    def experts(self, weights: ExpertWeights, spec: ExpertSpec, activation: Activation) -> MixtureProduct:
        """Keep the weights, quantized if configured; the router is never quantized. Rows of padding are undefined."""
        router, gate_up, down, biases = weights
        to_logits = StreamedLinear(router, None if biases is None else biases[0])
        self.linears.append(to_logits)
        ups, downs = (laid_out(weight, spec.count, self._quantization_of(weight)) for weight in (gate_up, down))
        counts, biases_of_experts = expert_counters(spec.count, to_logits.device), biases and biases[1:]

        def multiply(h: torch.Tensor, lora: LoraProducts | None = None, layer: int = 0) -> torch.Tensor:
            change = change_of(lora, layer, spec.count)
            if lora is None or change is None:
                logits = to_logits(h)
            else:
                logits = lora.multiply(to_logits, h, layer, (ROUTER,), (spec.count,))
            return multiply_by_experts(
                h,
                logits,
                ups,
                downs,
                counts,
                chosen=spec.chosen,
                is_normed=spec.is_normed,
                activation=activation,
                biases=biases_of_experts,
                decodes=self._decodes,
                change=change,
            )

        return multiply

    def routed_experts(self, gate_up: torch.Tensor, down: torch.Tensor, activation: Activation) -> RoutedExperts:
        """Keep the weights, quantized if configured."""
        count = len(gate_up)
        ups, downs = (laid_out(weight, count, self._quantization_of(weight)) for weight in (gate_up, down))
        counts = expert_counters(count, down.device)

        def multiply(
            h: torch.Tensor,
            experts: torch.Tensor,
            weights: torch.Tensor,
            decodes: torch.Tensor | None,
            lora: LoraProducts | None = None,
            layer: int = 0,
        ) -> torch.Tensor:
            return multiply_by_chosen(
                h,
                experts.int().contiguous(),
                weights.float().contiguous(),
                ups,
                downs,
                counts,
                activation=activation,
                decodes=decodes,
                change=change_of(lora, layer, count),
            )

        return multiply

    def _quantization_of(self, weight: Weight) -> str | None:
        if isinstance(weight, torch.Tensor) and (self._is_mixed or not _fits(weight, self._quantization)):
            return None
        return self._quantization

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Keep both unquantized. All steps write logits to one buffer, or each recording would have its own."""
        product = StreamedLinear(embedding if head is None else head, None, out_dtype=torch.float32)
        self.linears.append(product)
        kept = torch.empty(self._max_samples, product.shape[0], dtype=torch.float32, device=product.device)
        self.logits = kept

        def logits(h: torch.Tensor) -> torch.Tensor:
            room = kept if len(h) <= len(kept) else kept.new_empty(len(h), kept.shape[1])
            return product(h, room[: len(h)])

        return lambda token_ids: take_rows(embedding, token_ids), logits

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Return the filled products, None if the step has no adapter."""
        return self.adapters if self.adapters.scope else None

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Index."""
        return take_rows(x, indices)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """Add and norm in one pass."""
        if weight is None:
            return x if delta is None else x.add_(delta)
        is_final = self.adapters.scope < AdapterScope.WHOLE_MODEL
        return self._rounding.add_rms_norm(x, delta, weight, eps, is_final=is_final)

    def norm_columns(self, x: torch.Tensor, start: int, weight: torch.Tensor, eps: float) -> None:
        """Norm a copy."""
        part = x[:, start : start + len(weight)]
        part.copy_(add_rms_norm(part.contiguous(), None, weight, eps))

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
        """Norm, rotate and write in one pass, then attend to the cache in place; a row or two take one fused kernel."""
        # Lets the experts skip the padding rows of a recorded step.
        self._decodes = batch.rows[: batch.num_decodes]
        head_dim = cache.k.shape[-1]
        rotary_dim = form.rope.rotary_dim(head_dim)
        is_plain = not (form.window or form.softcap) and rotary_dim == head_dim and sinks is None
        weights = None if norms is None else (norms.q, norms.k)
        is_usual = weights is None or (weights[0].dtype == qkv.dtype and weights[0].dim() == 1)
        can_join = is_plain and is_usual and can_attend(qkv, cache.k)
        if JOINS_ARE_WANTED and can_join and batch.num_decodes == len(qkv):
            return rope_attention(
                qkv=qkv,
                cos_sin=cos_sin,
                norms=weights,
                eps=eps,
                k_cache=cache.k,
                v_cache=cache.v,
                slots=batch.slots,
                rows=batch.rows,
                tables=batch.tables,
                arrived=self._arrived,
                scale=form.scale,
            )
        q = rope_kv_write(
            qkv=qkv,
            cos_sin=cos_sin,
            norms=weights,
            eps=eps,
            k_cache=cache.k,
            v_cache=cache.v,
            slots=batch.slots,
            rotary_dim=rotary_dim,
            spans=cache.spans,
        )
        return paged_attention(
            q=q,
            k_cache=cache.k,
            v_cache=cache.v,
            rows=batch.rows,
            num_decodes=batch.num_decodes,
            tables=batch.tables,
            arrived=self._arrived,
            scale=form.scale,
            window=form.window,
            softcap=form.softcap,
            spans=cache.spans,
            sinks=sinks,
        )

    def activate_and_multiply(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Activate and multiply in one pass."""
        return self._rounding.activate_and_multiply(gate_up, activation)

    def state_kernels(self) -> StateKernels:
        """Return our kernels."""
        return STATE_KERNELS

    def normed(
        self,
        product: Product,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        activation: Activation | None = None,
    ) -> torch.Tensor:
        """Fuse the norm into the product for a row or two, and a SiLU gate where its kernel can."""
        assert isinstance(product, StreamedLinear)
        can_join = JOINS_ARE_WANTED and delta is None and len(x) in product.normed_rows
        if can_join and weight is not None and weight.dtype == x.dtype and activation in (None, "silu"):
            return product.normed(x, weight, eps)
        h = self.add_rms_norm(x, delta, weight, eps)
        if activation == "silu":
            return product.gated(h)
        return product(h) if activation is None else self.activate_and_multiply(product(h), activation)

    def added(self, product: Product, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
        """Fuse the addition into the product for a row or two."""
        assert isinstance(product, StreamedLinear)
        if not (JOINS_ARE_WANTED and product.can_add(len(h))):
            return product(h)
        product.add_to(x, h)
        return None


def _fits(weight: torch.Tensor, quantization: str | None) -> bool:
    """Return whether a weight [..., out, in] can be quantized; `engine.resolve` checks only modules that it knows."""
    if quantization == "int4":
        return weight.shape[-1] % INT4_MULTIPLE_BY_DEVICE["cuda"] == 0
    return quantization is None or not any(size % FP8_MULTIPLE for size in weight.shape[-2:])
