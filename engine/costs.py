"""What a decoder must read and compute at least: arithmetic on its geometry, for plans and benchmarks."""

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
    """Return how many weights a decode step reads: all but the rows of an untied embedding that nobody asks for.

    Of a mixture of experts those that some of `num_rows` meet, if all experts are as likely.
    """
    return num_weights(spec) - _num_unread(spec) - _num_unmet_experts(spec, num_rows) * sum(map(prod, _expert(spec)))


def num_idle_weights(spec: ModelSpec) -> float:
    """Return how many weights of the layers one token does not meet: of experts that it has not chosen."""
    return _num_unmet_experts(spec, 1) * sum(map(prod, _expert(spec)))


def weight_bytes(spec: ModelSpec, element_bytes: int) -> float:
    """Return what the weights take on a GPU: `element_bytes` each, save those that a checkpoint has in fewer bits."""
    saved = 0.0
    if isinstance(spec, DecoderSpec) and spec.stored is not None:
        # Of those, several experts' matrices in one tensor count as one.
        count = spec.experts.count if spec.experts is not None and isinstance(spec.stored, StoredMxfp4) else 1
        for depth, out in spec.stored_shapes().values():
            saved += count * (depth * out * element_bytes - spec.stored.num_bytes(out, depth, element_bytes))
    return num_weights(spec) * element_bytes - saved


def step_weight_bytes(spec: ModelSpec, element_bytes: int, num_rows: int = 1) -> float:
    """Return what of `weight_bytes` a decode step of so many rows reads."""
    each = 0.0
    for depth, out in _expert(spec):
        # In other layouts experts in one tensor are numbers.
        is_number = isinstance(spec, DecoderSpec) and spec.expert_names.are_one
        stored = None if is_number and not isinstance(spec.stored, StoredMxfp4) else spec.stored
        each += depth * out * element_bytes if stored is None else stored.num_bytes(out, depth, element_bytes)
    unmet_bytes = _num_unmet_experts(spec, num_rows) * each
    return weight_bytes(spec, element_bytes) - _num_unread(spec) * element_bytes - unmet_bytes


def num_layer_weights(spec: ModelSpec) -> int:
    """Return how many weights the layers have, without embedding and output matrix."""
    if isinstance(spec, FallbackSpec):
        return spec.num_layer_weights
    assert isinstance(spec, DecoderSpec)
    return sum(parameter.numel for parameter in parameters(spec) if parameter.name.startswith("layers."))


def prompt_flop(spec: ModelSpec, num_tokens: int) -> float:
    """Return what one prompt computes in the layers: two for each weight and token, four for each pair attended."""
    reaches = _reaches(spec, num_tokens)
    pairs = sum(reach * (num_tokens - reach / 2) for reach in reaches)
    return 2.0 * (num_layer_weights(spec) - num_idle_weights(spec)) * num_tokens + 4.0 * spec.q_size * pairs


def cache_bytes(spec: ModelSpec, num_tokens: float, element_bytes: int) -> float:
    """Return what of the KV cache a text of so many tokens takes, and the next token reads: less where windows are."""
    return sum(_reaches(spec, num_tokens)) * spec.kv_bytes_per_token(element_bytes) / spec.num_layers


def _reaches(spec: ModelSpec, num_tokens: float) -> list[float]:
    return [min(num_tokens, form.window or num_tokens) for form in spec.layers]


def _num_unread(spec: ModelSpec) -> int:
    return 0 if spec.is_tied else spec.vocab_size * spec.hidden_size


def _expert(spec: ModelSpec) -> list[tuple[int, int]]:
    """Return (in, out) of the products of one expert; none where a token meets all weights, as far as is known."""
    if not isinstance(spec, DecoderSpec) or spec.experts is None:
        return []
    hidden, inner = spec.hidden_size, spec.experts.inner_size
    return [(hidden, inner), (hidden, inner), (inner, hidden)]


def _num_unmet_experts(spec: ModelSpec, num_rows: int) -> float:
    """Return how many experts of all layers none of some rows meets, if all are as likely."""
    if not isinstance(spec, DecoderSpec) or spec.experts is None:
        return 0.0
    is_unmet = (1 - spec.experts.chosen / spec.experts.count) ** num_rows
    return sum(form.is_sparse for form in spec.layers) * spec.experts.count * is_unmet
