"""What a decoder must read and compute at least: arithmetic on its geometry, for plans and benchmarks."""

from __future__ import annotations

from engine.decoder.spec import DecoderSpec
from engine.loading.names import parameters


def num_weights(spec: DecoderSpec) -> int:
    """Return how many weights the model has."""
    return sum(parameter.numel for parameter in parameters(spec))


def num_step_weights(spec: DecoderSpec) -> int:
    """Return how many weights a decode step reads: all but the rows of an untied embedding that nobody asks for."""
    return num_weights(spec) - (0 if spec.is_tied else spec.vocab_size * spec.hidden_size)


def weight_bytes(spec: DecoderSpec, element_bytes: int) -> float:
    """Return what the weights take on a GPU: `element_bytes` each, save those that a checkpoint has in fewer bits."""
    saved = 0.0
    if spec.stored is not None:
        for depth, out in spec.linear_shapes().values():
            saved += depth * out * element_bytes - spec.stored.num_bytes(out, depth, element_bytes)
    return num_weights(spec) * element_bytes - saved


def step_weight_bytes(spec: DecoderSpec, element_bytes: int) -> float:
    """Return what of `weight_bytes` a decode step reads."""
    return weight_bytes(spec, element_bytes) - (num_weights(spec) - num_step_weights(spec)) * element_bytes


def num_layer_weights(spec: DecoderSpec) -> int:
    """Return how many weights the layers have, without embedding and output matrix."""
    return sum(parameter.numel for parameter in parameters(spec) if parameter.name.startswith("layers."))


def prompt_flop(spec: DecoderSpec, num_tokens: int) -> float:
    """Return what one prompt computes in the layers: two for each weight and token, four for each pair attended."""
    reaches = [min(num_tokens, form.window or num_tokens) for form in spec.layers]
    pairs = sum(reach * (num_tokens - reach / 2) for reach in reaches)
    return 2.0 * num_layer_weights(spec) * num_tokens + 4.0 * spec.q_size * pairs
