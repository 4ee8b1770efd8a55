"""Lower bounds on what a decoder reads and computes: arithmetic on its geometry, for planning and benchmarks."""

from __future__ import annotations

from math import prod

from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored_mxfp4 import StoredMxfp4
from engine.fallback.spec import FallbackSpec
from engine.loading.names import parameters


def num_weights(spec: ModelSpec) -> int:
    """Return how many weights the model has."""
    if isinstance(spec, FallbackSpec):
        return spec.num_weights
    assert isinstance(spec, DecoderSpec)
    return sum(parameter.numel for parameter in parameters(spec))


def num_step_weights(spec: ModelSpec, num_rows: int = 1) -> float:
    """Return how many weights a decode step reads: all except an untied embedding, of which it reads a few rows.

    Of a mixture, only the experts expected to be chosen by any of `num_rows` rows, if all are equally likely.
    """
    return num_weights(spec) - _num_unread(spec) - _num_unmet_experts(spec, num_rows) * sum(map(prod, _expert(spec)))


def num_idle_weights(spec: ModelSpec) -> float:
    """Return how many weights of the layers one token does not use: those of experts not chosen for it."""
    return _num_unmet_experts(spec, 1) * sum(map(prod, _expert(spec)))


def weight_bytes(spec: ModelSpec, element_bytes: int) -> float:
    """Return the size of the weights on a GPU: `element_bytes` each, except those that the checkpoint has quantized."""
    saved = 0.0
    if isinstance(spec, DecoderSpec) and spec.stored is not None:
        # In MXFP4 each shape is that of one expert, for a tensor that stacks the matrices of all.
        count = spec.experts.count if spec.experts is not None and isinstance(spec.stored, StoredMxfp4) else 1
        for depth, out in spec.stored_shapes().values():
            saved += count * (depth * out * element_bytes - spec.stored.num_bytes(out, depth, element_bytes))
    return num_weights(spec) * element_bytes - saved


def step_weight_bytes(spec: ModelSpec, element_bytes: int, num_rows: int = 1) -> float:
    """Return how many of the `weight_bytes` a decode step of `num_rows` rows reads."""
    each = 0.0
    for depth, out in _expert(spec):
        # In formats other than MXFP4, experts stacked in one tensor are not quantized.
        is_number = isinstance(spec, DecoderSpec) and spec.expert_names.are_one
        stored = None if is_number and not isinstance(spec.stored, StoredMxfp4) else spec.stored
        each += depth * out * element_bytes if stored is None else stored.num_bytes(out, depth, element_bytes)
    unmet_bytes = _num_unmet_experts(spec, num_rows) * each
    return weight_bytes(spec, element_bytes) - _num_unread(spec) * element_bytes - unmet_bytes


def num_layer_weights(spec: ModelSpec) -> int:
    """Return how many weights the layers have, excluding embedding and output matrix."""
    if isinstance(spec, FallbackSpec):
        return spec.num_layer_weights
    assert isinstance(spec, DecoderSpec)
    return sum(parameter.numel for parameter in parameters(spec) if parameter.name.startswith("layers."))


def prompt_flop(spec: ModelSpec, num_tokens: int) -> float:
    """Return the FLOP of a prompt in the layers: 2 per weight and token, 4 per query dimension and attended pair."""
    reaches = _reaches(spec, num_tokens)
    pairs = sum(reach * (num_tokens - reach / 2) for reach in reaches)
    return product_flop(spec, num_tokens) + 4.0 * spec.q_size * pairs


def product_flop(spec: ModelSpec, num_tokens: int) -> float:
    """Return the part of `prompt_flop` that is in products with the layers' weights."""
    return 2.0 * (num_layer_weights(spec) - num_idle_weights(spec)) * num_tokens


def cache_bytes(spec: ModelSpec, num_tokens: float, element_bytes: int) -> float:
    """Return the KV cache bytes that `num_tokens` tokens take and the next token reads; sliding windows take less."""
    return sum(_reaches(spec, num_tokens)) * spec.kv_bytes_per_token(element_bytes) / spec.num_layers


def _reaches(spec: ModelSpec, num_tokens: float) -> list[float]:
    return [min(num_tokens, form.window or num_tokens) for form in spec.layers]


def _num_unread(spec: ModelSpec) -> int:
    return 0 if spec.is_tied else spec.vocab_size * spec.hidden_size


def _expert(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return (in, out) of each product of one expert; empty if the model is not known to have experts."""
    mixtures = spec.mixtures()
    if mixtures is None:
        return []
    hidden, inner = spec.hidden_size, mixtures.inner
    return [(hidden, inner), (hidden, inner), (inner, hidden)]


def _num_unmet_experts(spec: ModelSpec, num_rows: int) -> float:
    """Return the expected number of experts, over all layers, that no row chooses, if all are equally likely."""
    mixtures = spec.mixtures()
    if mixtures is None:
        return 0.0
    is_unmet = (1 - mixtures.chosen / mixtures.num_experts) ** num_rows
    return mixtures.num_layers * mixtures.num_experts * is_unmet
