"""Text decoders inside vision-language checkpoints: extract the decoder's fields from config.json.

They are in `text_config`, which omits a family's default values; a few may be at the top level instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.decoder.fields import Fields
from engine.errors import CheckpointError

TEXT_BY_WRAPPER = {
    "Gemma3ForConditionalGeneration": "gemma3_text",
    "LlavaForConditionalGeneration": "llama",
    "Mistral3ForConditionalGeneration": "mistral",
}
"""Default of `text_config.model_type`, by the architecture of the whole model."""

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
    usual: Mapping[str, int]


_TEXT_BY_TYPE = {
    "gemma3_text": _Text("Gemma3ForCausalLM", _GEMMA3),
    "llama": _Text("LlamaForCausalLM", _LLAMA),
    "mistral": _Text("MistralForCausalLM", _LLAMA | _MISTRAL),
    "qwen2": _Text("Qwen2ForCausalLM", _LLAMA | _QWEN2 | {"max_position_embeddings": 32_768}),
}
"""With the defaults of transformers' configuration classes, which apply to omitted fields."""

_TIED = "tie_word_embeddings"


def decoder_fields(config: Mapping[str, object], where: str) -> Fields:
    """Return the decoder's fields with its own architecture, whether it is the whole model or a part of it.

    Raises:
        CheckpointError: a vision-language model has no `text_config`, or its decoder is not supported.
    """
    names = config.get("architectures")
    wrapper = names[0] if isinstance(names, list) and len(names) == 1 else None
    if not isinstance(wrapper, str) or wrapper not in TEXT_BY_WRAPPER:
        return Fields(config, where)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config must be an object, it is {text!r}.")
    model_type = text.get("model_type", TEXT_BY_WRAPPER[wrapper])
    if not isinstance(model_type, str) or model_type not in _TEXT_BY_TYPE:
        known = ", ".join(sorted(_TEXT_BY_TYPE))
        raise CheckpointError(f"{where}: text_config.model_type is {model_type!r}; supported are {known}.")
    architecture, usual = _TEXT_BY_TYPE[model_type]
    beside = {name: config[name] for name in ("eos_token_id", "quantization_config") if config.get(name) is not None}
    tied = [block[_TIED] for block in (config, text) if block.get(_TIED) is not None]
    # A re-saved wrapper may say true by default although its decoder has an output matrix; an explicit false wins.
    beside |= {_TIED: False if False in tied else tied[0]} if tied else {}
    return Fields({**usual, **text, **beside, "architectures": [architecture]}, f"{where}: text_config")
