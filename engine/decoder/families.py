"""Where the families of decoders differ: by a bias, a norm, a default. One row each."""

from __future__ import annotations

from dataclasses import dataclass

Switch = bool | str
"""What the family's code fixes, or the name of the field of config.json (false by default) that decides."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """What a config.json leaves unsaid because the family's code says it.

    Attributes:
        has_qk_norm: each query and key head is normalised before the rotation.
        uses_window: whether `sliding_window` holds.
        num_full_layers: default of `max_window_layers`: so many layers at the beginning have no window.
    """

    qkv_bias: Switch
    o_bias: Switch
    mlp_bias: Switch
    has_qk_norm: bool
    uses_window: Switch
    num_full_layers: int = 0


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        qkv_bias="attention_bias", o_bias="attention_bias", mlp_bias="mlp_bias", has_qk_norm=False, uses_window=False
    ),
    "MistralForCausalLM": Family(qkv_bias=False, o_bias=False, mlp_bias=False, has_qk_norm=False, uses_window=True),
    "Qwen2ForCausalLM": Family(
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        has_qk_norm=False,
        uses_window="use_sliding_window",
        num_full_layers=28,
    ),
    "Qwen3ForCausalLM": Family(
        qkv_bias="attention_bias",
        o_bias="attention_bias",
        mlp_bias=False,
        has_qk_norm=True,
        uses_window="use_sliding_window",
        num_full_layers=28,
    ),
}

DECODER_BY_BASE = {f"{name.removesuffix('ForCausalLM')}Model": name for name in FAMILIES}
"""Architectures of the same decoders without an output matrix, as embedding models are saved."""
