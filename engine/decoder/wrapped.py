"""Text decoders inside vision-language checkpoints: extract the decoder's fields from config.json.

They are in `text_config`, which omits a family's default values; a few may be at the top level instead. Only text is
served, whose three positions per token in Qwen's models are equal, so that angles are the plain ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.decoder.families import QWEN3_VL_MOE
from engine.decoder.fields import Fields
from engine.errors import CheckpointError

TEXT_BY_WRAPPER = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "LlavaForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral",
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen3VLForConditionalGeneration": "qwen3_vl_text",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl_moe_text",
}
"""Default of `text_config.model_type`, by the architecture of the whole model."""
_FLAT = ("Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration")
"""Architectures whose published checkpoints have the decoder's fields at the top level."""

_LLAMA = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
}
_MISTRAL = {"intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 131_072}
_QWEN2 = {"vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32}
_QWEN3 = _QWEN2 | {"head_dim": 128}
_QWEN2_VL = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "max_window_layers": 80,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN3_VL_MOE = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 128_000,
    "moe_intermediate_size": 1408,
    "num_experts_per_tok": 4,
    "rope_theta": 5e5,
}
_GEMMA3 = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
}


class _Text(NamedTuple):
    architecture: str
    usual: Mapping[str, float]


_TEXT_BY_TYPE = {
    "gemma3_text": _Text("Gemma3ForCausalLM", _GEMMA3),
    "llama": _Text("LlamaForCausalLM", _LLAMA),
    "mistral": _Text("MistralForCausalLM", _LLAMA | _MISTRAL),
    "qwen2": _Text("Qwen2ForCausalLM", _LLAMA | _QWEN2 | {"max_position_embeddings": 32_768}),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text"), _Text("Qwen2ForCausalLM", _QWEN2_VL)),
    "qwen3": _Text("Qwen3ForCausalLM", _LLAMA | _QWEN3 | {"max_position_embeddings": 32_768}),
    "qwen3_vl_text": _Text(
        "Qwen3ForCausalLM", _LLAMA | _QWEN3 | {"max_position_embeddings": 128_000, "rope_theta": 5e5}
    ),
    "qwen3_vl_moe_text": _Text(QWEN3_VL_MOE, _QWEN3_VL_MOE),
}
"""With the defaults of transformers' configuration classes, which apply to omitted fields."""

_TIED = "tie_word_embeddings"


def decoder_fields(config: Mapping[str, object], where: str) -> Fields:
    """Return the decoder's fields with its own architecture, whether it is the whole model or a part of it.

    A part of another type keeps the architecture of the whole, which no family has.

    Raises:
        CheckpointError: a vision-language model has no `text_config`.
    """
    names = config.get("architectures")
    wrapper = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(wrapper, str) or wrapper not in TEXT_BY_WRAPPER:
        return Fields(config, where)
    text, usual_type = config.get("text_config"), TEXT_BY_WRAPPER[wrapper]
    if text is None and wrapper in _FLAT:
        text = {**config, "model_type": usual_type}
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config must be an object, it is {text!r}.")
    model_type = text.get("model_type", usual_type)
    if not isinstance(model_type, str):
        raise CheckpointError(f"{where}: text_config.model_type must be a name, it is {model_type!r}.")
    if model_type not in _TEXT_BY_TYPE:
        return Fields(config, where)
    architecture, usual = _TEXT_BY_TYPE[model_type]
    beside = {name: config[name] for name in ("eos_token_id", "quantization_config") if config.get(name) is not None}
    tied = [block[_TIED] for block in (config, text) if block.get(_TIED) is not None]
    # A re-saved wrapper may say true by default although its decoder has an output matrix; an explicit false wins.
    beside |= {_TIED: False if False in tied else tied[0]} if tied else {}
    return Fields({**usual, **text, **beside, "architectures": [architecture]}, f"{where}: text_config")
