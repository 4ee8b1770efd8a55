"""The decoder for all devices: embedding, layers, final norm, output matrix. Only the `Backend` is device-specific."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from adapters.tensor_names import WHOLE_MODEL
from engine.adapter_tables import HEAD_NORMS
from engine.attention import AttentionBatch
from engine.backend import Backend, ExpertWeights, MixtureProduct, Product
from engine.decoder.layer_forms import LayerForm
from engine.decoder.rope_table import rope_table
from engine.decoder.spec import DecoderSpec
from engine.kv_cache import KvCache, LayerCache
from engine.loading.weight import Weight
from engine.lora import AdapterSegment, HeadNorms, LoraProducts, change_norms
from engine.step import StateMoves

AddRmsNorm = Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor, float], torch.Tensor]
"""Defined in `kernels.add_rms_norm.reference`."""

QKV = ("q_proj", "k_proj", "v_proj")
GATE_UP = ("gate_proj", "up_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderBatch:
    """The tokens of one step.

    Attributes:
        token_ids, positions: [tokens] int64.
        attention: one for the layers of each table of the cache layout; they differ in slots and tables.
        host_rows: the rows of `attention` as the host knows them, int64 [rows, 4]; None if they are in its memory.
        sampled: [samples] int64, indices of the tokens to compute logits for.
        samples_each: `sampled` is all tokens, in order.
        adapters: segments of the tokens that have an adapter, in ascending order.
        sample_adapters: the same for samples; needed if an adapter changes the whole model
            (`adapters.weights.AdapterWeights`), otherwise empty.
        pooled: half-open token ranges to return hidden states for, disjoint, each of one request.
        state_moves: recurrent states to copy; None if there are none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    sampled: torch.Tensor
    attention: tuple[AttentionBatch, ...]
    host_rows: NDArray[np.int64] | None = None
    samples_each: bool = False
    adapters: tuple[AdapterSegment, ...] = ()
    sample_adapters: tuple[AdapterSegment, ...] = ()
    pooled: tuple[tuple[int, int], ...] = ()
    state_moves: StateMoves | None = None


class StepOutput(NamedTuple):
    """The result of a step, valid until the next step.

    Attributes:
        logits: [samples, vocab] float32.
        hidden: [tokens in range, hidden] for each range of `DecoderBatch.pooled`, after the final norm.
    """

    logits: torch.Tensor
    hidden: Sequence[torch.Tensor] = ()


@dataclass(frozen=True, slots=True)
class Mlp:
    """The two linear products of a gated MLP."""

    gate_up: Product
    down: Product


@dataclass(frozen=True, slots=True)
class Mixture:
    """A mixture of experts and, if there is one, the shared expert with the gate of its output."""

    experts: MixtureProduct
    shared: Mlp | None
    shared_gate: torch.Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The parameters of one layer; norms are vectors, projections are in the device's layout.

    Attributes:
        input_norm, mlp_norm: norms of the inputs of attention and of the MLP (or mixture of experts); o_norm,
            down_norm: norms of their outputs.
    """

    input_norm: torch.Tensor | None
    qkv: Product
    sinks: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Product
    o_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | Mixture
    down_norm: torch.Tensor | None


class Decoder:
    """A decoder-only transformer over a paged KV cache.

    Args:
        parameters: (name, tensor) for every name of `engine.loading.names.parameters`, in that order. Takes ownership.
        max_len: number of positions in the rotary tables.
    """

    def __init__(
        self, spec: DecoderSpec, parameters: Iterable[tuple[str, Weight]], backend: Backend, max_len: int
    ) -> None:
        self.spec = spec
        self._backend = backend
        self._layers: list[Layer] = []
        beside: dict[str, Any] = {}
        # Layer by layer: with quantization, memory holds all weights quantized, but not all of them as loaded.
        for layer, named in groupby(parameters, key=lambda parameter: _layer_of(parameter[0])):
            if layer is None:
                beside |= named
            else:
                self._layers.append(_layer(dict(named), f"layers.{layer}", spec, backend))
        self._forms = [form.within(max_len) for form in spec.layers]
        self._norm = beside.pop("norm")
        embedding, head = beside.pop("embedding"), beside.pop("head", None)
        # One table [positions, 2, head_dim] for each rotary embedding
        self._cos_sin = {
            rope: rope_table(rope, spec.head_dim, max_len, embedding.dtype).to(embedding.device)
            for rope in dict.fromkeys(form.rope for form in self._forms)
        }
        self._embedding_scale = float(torch.tensor(spec.scales.embedding, dtype=embedding.dtype))
        self._embed, self._head = backend.vocabulary(embedding, head)

    @torch.inference_mode()
    def forward(self, batch: DecoderBatch, cache: KvCache) -> StepOutput:
        """Compute a step and write its keys and values to the cache."""
        lora = self._backend.lora(batch.adapters, batch.sample_adapters)
        x, delta = self.residual(batch, cache, lora)
        logits = self.logits(x, delta, None if batch.samples_each else batch.sampled, lora)
        return StepOutput(logits, self.hidden(x, delta, batch, self._backend.add_rms_norm))

    @torch.inference_mode()
    def residual(
        self, batch: DecoderBatch, cache: KvCache, lora: LoraProducts | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the layers and write the cache; return two [tokens, hidden] whose sum is the final norm's input."""
        x = self._embed(batch.token_ids)  # [tokens, hidden]: the residual stream, added to in place
        if lora is not None:
            lora.embed(batch.token_ids, x)
        if self._embedding_scale != 1.0:
            self._backend.rescale(x, self._embedding_scale)
        cos_sin = {rope: self._backend.take(table, batch.positions) for rope, table in self._cos_sin.items()}
        delta: torch.Tensor | None = None  # the last sublayer's output, which the next norm adds to x
        for index, (layer, form) in enumerate(zip(self._layers, self._forms, strict=True)):
            own = cache.layer(index)
            attend = partial(self._attend, layer, form, cos_sin[form.rope], batch.attention[own.table], own)
            if lora is None:
                delta = self._layer(layer, x, delta, attend)
            else:
                adapted = partial(attend, index=index, lora=lora)
                delta = self._adapted_layer(index, layer, x, delta, adapted, lora)
        return x, delta

    @torch.inference_mode()
    def logits(
        self, x: torch.Tensor, delta: torch.Tensor | None, sampled: torch.Tensor | None, lora: LoraProducts | None
    ) -> torch.Tensor:
        """Return float32 logits [samples, vocab] of `residual`'s result; `sampled` None is all tokens, changing `x`."""
        backend = self._backend
        if sampled is not None:
            if not len(sampled):
                return torch.empty(0, self.spec.vocab_size, device=x.device)
            x, delta = backend.take(x, sampled), None if delta is None else backend.take(delta, sampled)
        h = backend.add_rms_norm(x, delta, self._norm, self.spec.rms_eps)
        if lora is not None:
            lora.norm(WHOLE_MODEL, "norm", h)
        logits = self._head(h)
        if lora is not None:
            lora.head(h, logits)
        scales = self.spec.scales
        if (scales.logits, scales.logit_softcap) != (1.0, 0.0):
            backend.rescale(logits, scales.logits, scales.logit_softcap)
        return logits

    @torch.inference_mode()
    def hidden(
        self, x: torch.Tensor, delta: torch.Tensor | None, batch: DecoderBatch, add_rms_norm: AddRmsNorm
    ) -> list[torch.Tensor]:
        """Return the final hidden states of `batch.pooled`; changes those rows of `x`, the result of `residual`."""
        states = [
            add_rms_norm(x[start:end], None if delta is None else delta[start:end], self._norm, self.spec.rms_eps)
            for start, end in batch.pooled
        ]
        if states:
            change_norms(batch.adapters, batch.pooled, states)
        return states

    def _layer(self, layer: Layer, x: torch.Tensor, delta: torch.Tensor | None, attend: Product) -> torch.Tensor | None:
        """Compute a layer: add the pending `delta` to `x`, and return the layer's own delta, None if already added."""
        backend, eps = self._backend, self.spec.rms_eps
        qkv = backend.normed(layer.qkv, x, delta, layer.input_norm, eps)
        delta = self._added(layer.o, attend(qkv), x, layer.o_norm)
        if isinstance(layer.mlp, Mixture):
            mixed = self._mixed(layer.mlp, backend.add_rms_norm(x, delta, layer.mlp_norm, eps))
            return self._settled(mixed, layer.down_norm)
        gated = backend.normed(layer.mlp.gate_up, x, delta, layer.mlp_norm, eps, self.spec.activation)
        return self._added(layer.mlp.down, gated, x, layer.down_norm)

    def _adapted_layer(
        self,
        index: int,
        layer: Layer,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        attend: Product,
        lora: LoraProducts,
    ) -> torch.Tensor:
        """Compute a layer with adapters on its norms and linear products."""
        spec, backend, eps = self.spec, self._backend, self.spec.rms_eps
        norms = spec.norms

        def adapt(name: str | None, h: torch.Tensor) -> None:
            if name is not None:
                lora.norm(index, name, h)

        h = backend.add_rms_norm(x, delta, layer.input_norm, eps)
        adapt(norms.before_attention, h)
        qkv = lora.multiply(layer.qkv, h, index, QKV, (spec.q_size, spec.kv_size, spec.kv_size))
        delta = lora.multiply(layer.o, attend(qkv), index, ("o_proj",), (spec.hidden_size,))
        delta = self._settled(delta, layer.o_norm, partial(adapt, norms.after_attention))
        h = backend.add_rms_norm(x, delta, layer.mlp_norm, eps)
        adapt(norms.before_mlp, h)
        if isinstance(layer.mlp, Mixture):
            delta = self._mixed(layer.mlp, h, index, lora)
        else:
            delta = self._adapted_mlp(layer.mlp, spec.intermediate_size, h, index, lora)
        return self._settled(delta, layer.down_norm, partial(adapt, norms.after_mlp))

    def _mixed(
        self, mixture: Mixture, h: torch.Tensor, index: int = 0, lora: LoraProducts | None = None
    ) -> torch.Tensor:
        """Return the output of a mixture of experts for `h`; adapters treat the shared expert as the layer's MLP."""
        spec, shared = self.spec, mixture.shared
        delta = mixture.experts(h, lora, index)
        if shared is not None and mixture.shared_gate is not None and spec.experts is not None:
            if lora is None:
                added = shared.down(self._backend.activate_and_multiply(shared.gate_up(h), spec.activation))
            else:
                added = self._adapted_mlp(shared, spec.experts.shared_size, h, index, lora)
            self._backend.add_gated(delta, h, mixture.shared_gate, added)
        return delta

    def _adapted_mlp(self, mlp: Mlp, width: int, h: torch.Tensor, index: int, lora: LoraProducts) -> torch.Tensor:
        gate_up = lora.multiply(mlp.gate_up, h, index, GATE_UP, (width, width))
        gated = self._backend.activate_and_multiply(gate_up, self.spec.activation)
        return lora.multiply(mlp.down, gated, index, ("down_proj",), (self.spec.hidden_size,))

    def _added(
        self, product: Product, h: torch.Tensor, x: torch.Tensor, norm: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Return a sublayer's update of `x`, the product of `h`, or None if it was added in place."""
        is_plain = norm is None and self.spec.scales.residual == 1.0
        return self._backend.added(product, h, x) if is_plain else self._settled(product(h), norm)

    def _settled(
        self,
        delta: torch.Tensor,
        norm: torch.Tensor | None,
        adapt: Callable[[torch.Tensor], None] = lambda normed: None,
    ) -> torch.Tensor:
        """Return a sublayer's update `delta`, normed and scaled if the family does so."""
        if norm is not None:
            delta = self._backend.add_rms_norm(delta, None, norm, self.spec.rms_eps)
            adapt(delta)
        if self.spec.scales.residual != 1.0:
            self._backend.rescale(delta, self.spec.scales.residual)
        return delta

    def _attend(
        self,
        layer: Layer,
        form: LayerForm,
        cos_sin: torch.Tensor,
        attention: AttentionBatch,
        cache: LayerCache,
        qkv: torch.Tensor,
        index: int = 0,
        lora: LoraProducts | None = None,
    ) -> torch.Tensor:
        spec = self.spec
        norms = None if layer.q_norm is None or layer.k_norm is None else HeadNorms(layer.q_norm, layer.k_norm)
        if norms is not None and spec.norms_heads_together:
            for name, start, norm in zip(HEAD_NORMS, (0, spec.q_size), (norms.q, norms.k), strict=True):
                self._backend.norm_columns(qkv, start, norm, spec.rms_eps)
                if lora is not None:
                    lora.norm(index, name, qkv[:, start : start + len(norm)])
            norms = None
        elif norms is not None and lora is not None:
            norms = lora.head_norms(index, norms, len(qkv))
        eps, sinks = self.spec.rms_eps, layer.sinks
        return self._backend.attend(qkv, cos_sin, norms, eps, cache, attention, form, sinks).flatten(1)


def _layer_of(parameter: str) -> int | None:
    """Return the layer index in a parameter's name, None outside of the layers."""
    parts = parameter.split(".")
    return int(parts[1]) if parts[0] == "layers" else None


def _layer(by_name: dict[str, Any], prefix: str, spec: DecoderSpec, backend: Backend) -> Layer:
    def linear(name: str) -> Product:
        weight, bias = by_name.pop(f"{prefix}.{name}.weight"), by_name.pop(f"{prefix}.{name}.bias", None)
        return backend.linear(name, weight, bias)

    return Layer(
        input_norm=by_name.pop(f"{prefix}.input_norm", None),
        qkv=linear("qkv"),
        sinks=by_name.pop(f"{prefix}.sinks", None),
        q_norm=by_name.pop(f"{prefix}.q_norm", None),
        k_norm=by_name.pop(f"{prefix}.k_norm", None),
        o=linear("o"),
        o_norm=by_name.pop(f"{prefix}.o_norm", None),
        mlp_norm=by_name.pop(f"{prefix}.mlp_norm", None),
        mlp=_mixture(by_name, prefix, spec, backend, linear)
        if f"{prefix}.router" in by_name
        else Mlp(linear("gate_up"), linear("down")),
        down_norm=by_name.pop(f"{prefix}.down_norm", None),
    )


def _mixture(
    by_name: dict[str, Any], prefix: str, spec: DecoderSpec, backend: Backend, linear: Callable[[str], Product]
) -> Mixture:
    assert spec.experts is not None
    count = spec.experts.count

    def pop_each(name: str) -> Weight:
        weight: Weight = by_name.pop(f"{prefix}.experts.{name}")
        return weight.view(count, -1, weight.shape[-1]) if isinstance(weight, torch.Tensor) else weight

    router_bias, up_bias, down_bias = (
        by_name.pop(f"{prefix}.{name}", None) for name in ("router_bias", "experts.gate_up_bias", "experts.down_bias")
    )
    biases = None if router_bias is None else (router_bias, up_bias, down_bias)
    # Bound to no name here, so that the weights are freed as soon as they are laid out.
    experts = backend.experts(
        ExpertWeights(by_name.pop(f"{prefix}.router"), pop_each("gate_up"), pop_each("down"), biases),
        spec.experts,
        spec.activation,
    )
    shared_gate = by_name.pop(f"{prefix}.shared_gate", None)
    shared = None if shared_gate is None else Mlp(linear("shared_gate_up"), linear("shared_down"))
    return Mixture(experts, shared, shared_gate)
