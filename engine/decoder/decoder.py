"""The decoder, written once: embedding, layers, final norm, output matrix. Devices differ by a `Backend` only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from engine.attention import AttentionBatch
from engine.backend import Backend, KvCache
from engine.decoder.spec import DecoderSpec
from engine.linear import Linear
from engine.lora import LoraBatch

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderBatch:
    """The tokens of one step.

    Attributes:
        token_ids, positions: [tokens] int64.
        sampled: [samples] int64, indices of the tokens whose logits are wanted.
        lora: None where no row has an adapter.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    attention: AttentionBatch
    lora: LoraBatch | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The parameters of one layer; norms are vectors, projections are laid out for the device."""

    input_norm: torch.Tensor
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Linear
    mlp_norm: torch.Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """A decoder-only transformer over a paged KV cache.

    Args:
        parameters: (name, tensor) for every name of `engine.loading.names.parameters`, given away.
        max_len: positions that the rotary table covers.
    """

    def __init__(
        self, spec: DecoderSpec, parameters: Iterable[tuple[str, torch.Tensor]], backend: Backend, max_len: int
    ) -> None:
        self.spec = spec
        self._backend = backend
        by_name = dict(parameters)
        self._embedding = by_name.pop("embedding")
        self._norm = by_name.pop("norm")
        self._layers = [_layer(by_name, f"layers.{index}") for index in range(spec.num_layers)]
        self._head = Linear(by_name.pop("head") if not spec.is_tied else self._embedding)
        self._cos_sin = spec.rope.table(spec.head_dim, max_len, self._embedding.dtype).to(self._embedding.device)

    @torch.inference_mode()
    def forward(self, batch: DecoderBatch, cache: KvCache) -> torch.Tensor:
        """Compute a step, writing the cache; returns logits [samples, vocab] float32."""
        backend, eps = self._backend, self.spec.rms_eps
        x = self._embedding[batch.token_ids]  # [tokens, hidden]
        cos_sin = self._cos_sin[batch.positions]
        for index, layer in enumerate(self._layers):
            h = backend.rms_norm(x, layer.input_norm, eps)
            x = x + self._attention(index, layer, h, cos_sin, batch, cache)
            h = backend.rms_norm(x, layer.mlp_norm, eps)
            x = x + self._mlp(index, layer, h, batch.lora)
        if not len(batch.sampled):
            return torch.empty(0, self.spec.vocab_size, device=x.device)
        chosen = backend.rms_norm(x[batch.sampled], self._norm, eps)
        return self._head(chosen).float()

    def _attention(
        self,
        index: int,
        layer: Layer,
        h: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: DecoderBatch,
        cache: KvCache,
    ) -> torch.Tensor:
        spec, backend = self.spec, self._backend
        qkv = layer.qkv(h)
        if batch.lora is not None:
            batch.lora.apply_fused(index, QKV, h, qkv, (spec.q_size, spec.kv_size, spec.kv_size))
        q, k, v = (
            part.unflatten(-1, (-1, spec.head_dim))  # [tokens, heads, head_dim]
            for part in qkv.split((spec.q_size, spec.kv_size, spec.kv_size), dim=-1)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = backend.rms_norm(q, layer.q_norm, spec.rms_eps), backend.rms_norm(k, layer.k_norm, spec.rms_eps)
        q, k = backend.rotate(q, cos_sin), backend.rotate(k, cos_sin)
        kv = cache.layer(index)
        backend.write_kv(k, v, kv, batch.attention.slots)
        attended = backend.attend(q, kv, batch.attention).flatten(1)
        out = layer.o(attended)
        if batch.lora is not None:
            batch.lora.apply(index, "o_proj", attended, out)
        return out

    def _mlp(self, index: int, layer: Layer, h: torch.Tensor, lora: LoraBatch | None) -> torch.Tensor:
        gate_up = layer.gate_up(h)
        if lora is not None:
            inner = self.spec.intermediate_size
            lora.apply_fused(index, GATE_UP, h, gate_up, (inner, inner))
        gated = self._backend.silu_and_multiply(gate_up)
        out = layer.down(gated)
        if lora is not None:
            lora.apply(index, "down_proj", gated, out)
        return out


def _layer(by_name: dict[str, torch.Tensor], prefix: str) -> Layer:
    def linear(name: str) -> Linear:
        return Linear(by_name.pop(f"{prefix}.{name}.weight"), by_name.pop(f"{prefix}.{name}.bias", None))

    return Layer(
        input_norm=by_name.pop(f"{prefix}.input_norm"),
        qkv=linear("qkv"),
        q_norm=by_name.pop(f"{prefix}.q_norm", None),
        k_norm=by_name.pop(f"{prefix}.k_norm", None),
        o=linear("o"),
        mlp_norm=by_name.pop(f"{prefix}.mlp_norm"),
        gate_up=linear("gate_up"),
        down=linear("down"),
    )
