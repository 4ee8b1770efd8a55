"""The GPU's operations: our Triton kernels, and the vendor's library for dense products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.attention import AttentionBatch
from engine.backend import LayerCache, Product
from engine.gpu.adapters import Reach, TritonLora
from engine.gpu.rounding import InputRounding
from engine.gpu.streamed_linear import StreamedLinear
from engine.loading.fp8 import Fp8Weight
from engine.loading.weight import Weight
from engine.lora import AdapterSegment, LoraProducts
from kernels.embedding.reference import take_rows
from kernels.paged_attention.launch import counters, paged_attention
from kernels.rope_kv_write.launch import rope_kv_write


class TritonBackend:
    """A `Backend` on a GPU. Attention reads no slot past a row's own positions: blocks need not be cleared.

    Args:
        adapters: the products of the step under way; its owner fills it before each step.
        max_samples: so many rows of logits at most a step has, save where those of prompts are asked for.
        quantization: "fp8": layers' weights and their inputs are rounded to 8-bit floats; "int4": the weights alone, to
            4 bits where they have more; None: neither. Adapters read inputs as they are.
        is_mixed: weights that come as numbers, among others in 8-bit floats, are not rounded to those.

    Attributes:
        linears: products whose way `engine.gpu.streamed_linear.measure` may choose.
    """

    def __init__(
        self, adapters: TritonLora, max_samples: int, quantization: str | None = None, *, is_mixed: bool = False
    ) -> None:
        self.adapters = adapters
        self._max_samples = max_samples
        self.linears: list[StreamedLinear] = []
        self._quantization = quantization
        self._is_mixed = is_mixed
        self._rounding = InputRounding(is_wanted=quantization == "fp8")

    def linear(self, name: str, weight: Weight, bias: torch.Tensor | None) -> Product:
        """Keep the weight, as it is or rounded."""
        stays = self._quantization == "fp8" and self._is_mixed and not isinstance(weight, Fp8Weight)
        quantization = None if stays else self._quantization
        product = StreamedLinear(
            weight, bias, quantization=quantization, is_gate_up=name == "gate_up", rounding=self._rounding
        )
        self.linears.append(product)
        return product

    def vocabulary(self, embedding: torch.Tensor, head: torch.Tensor | None) -> tuple[Product, Product]:
        """Keep both as they are; all steps' logits come to lie in one place, or each recording had one of its own."""
        self._arrived = counters(embedding.device)
        product = StreamedLinear(embedding if head is None else head, None)
        self.linears.append(product)
        kept = torch.empty(self._max_samples, product.shape[0], dtype=torch.float32, device=product.device)

        def logits(h: torch.Tensor) -> torch.Tensor:
            found = product(h)
            return kept[: len(h)].copy_(found) if len(h) <= len(kept) else found.float()

        return lambda token_ids: take_rows(embedding, token_ids), logits

    def lora(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> LoraProducts | None:
        """Return the products that have been filled, None where the step has no adapter."""
        return self.adapters if self.adapters.reach else None

    def take(self, x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Index."""
        return take_rows(x, indices)

    def add_rms_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """Add and norm, one pass."""
        is_final = self.adapters.reach < Reach.WHOLE_MODEL
        return self._rounding.add_rms_norm(x, delta, weight, eps, is_final=is_final)

    def rotate_and_write(
        self,
        qkv: torch.Tensor,
        cos_sin: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cache: LayerCache,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Norm, rotate and write, one pass."""
        return rope_kv_write(
            qkv=qkv,
            cos_sin=cos_sin,
            norms=norms,
            eps=eps,
            k_cache=cache.k,
            v_cache=cache.v,
            slots=slots,
            spans=cache.spans,
        )

    def attend(self, q: torch.Tensor, cache: LayerCache, batch: AttentionBatch) -> torch.Tensor:
        """Attend to the cache where it lies."""
        return paged_attention(
            q=q,
            k_cache=cache.k,
            v_cache=cache.v,
            rows=batch.rows,
            num_decodes=batch.num_decodes,
            tables=batch.tables,
            arrived=self._arrived,
            spans=cache.spans,
        )

    def silu_and_multiply(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Gate, one pass."""
        return self._rounding.silu_and_multiply(gate_up)

    def gated(self, product: Product, x: torch.Tensor) -> torch.Tensor:
        """Let the product do it."""
        assert isinstance(product, StreamedLinear)
        return product.gated(x)
