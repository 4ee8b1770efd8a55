"""Names of an adapter's tensors, and of the modules that they change, as a whole decoder of the base has them.

Pure: standard library only.
"""

from __future__ import annotations

import re

from adapters.errors import AdapterError

# Some converters omit the prefix; vLLM accepts their output.
_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>(?:model|language_model|lm_head|layers|embed_tokens|norm)(?:\.(?!lora_)[A-Za-z0-9_]{1,40}){0,8}?)"
    r"\.(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_magnitude_vector|lora_embedding_[AB]"
    r"|token_adapter\.(?:trainable_tokens_delta|base_layer\.weight)|(?:base_layer\.)?(?:bias|weight))"
)
HEAD = "score"
"""The classifier of `AutoModelForSequenceClassification` on a decoder, which the base lacks."""
_HEAD_WEIGHT = re.compile(rf"(?:base_model\.model\.)?{HEAD}\.weight")
_OTHER_HEAD = re.compile(
    r"(?:base_model\.model\.)?(?P<head>(?:score|classifier|qa_outputs|v_head|value_head)\.[a-zA-Z_.]{1,60})"
)
"""Heads of adapters for other tasks (PEFT's `TOKEN_CLS`, `QUESTION_ANS`; TRL's value models), or changed otherwise."""
WHOLE_DECODER = ("", "")
_BY_BEGINNING = {
    # Trained on the decoder alone (`AutoModel`, as for embedding models).
    **dict.fromkeys(("layers.", "embed_tokens.", "norm."), ("", "model.")),
    # Trained on a vision-language model: current transformers, SmolVLM and Idefics3, and before 4.52.
    "model.language_model.": ("model.language_model.", "model."),
    "model.text_model.": ("model.text_model.", "model."),
    "language_model.": ("language_model.", ""),
}
"""Start of a tensor name -> (prefix of the adapter's module names, prefix of the same modules in a whole decoder)."""
ROUTER, ROUTER_NAMES = "router", r"gate|router|router\.layer"
"""A mixture's router as it is known here, and as architectures name it within their block."""
_LAYER_MODULE = re.compile(
    r"model\.layers\.(?P<layer>0|[1-9]\d{0,5})\."
    r"(?:self_attn\.(?P<attention>(?:q|k|v|o|qkv)_proj)|mlp\.(?:shared_expert\.)?(?P<mlp>(?:gate|up|down|gate_up)_proj)"
    rf"|(?:mlp|block_sparse_moe)\.(?P<router>{ROUTER_NAMES})"
    r"|(?:self_attn\.)?(?P<norm>[a-z_]*norm)|(?P<path>[A-Za-z0-9_.]+(?<!\.bias)))"
)
WHOLE_MODEL = -1
"""Used instead of a layer index for modules that occur once in the model."""
EMBEDDING = "model.embed_tokens"
MODEL_MODULES = {EMBEDDING: "embed_tokens", "model.norm": "norm", "lm_head": "lm_head"}
"""Modules that occur once, by full name."""


def parse_tensor_name(name: str, tensor: str) -> tuple[str, str]:
    """Split a tensor's name into the module's full name in the base model and the part of the module.

    The part is "lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_magnitude_vector", "lora_embedding_A" or "_B",
    "trainable_tokens_delta", "bias", "weight", or "base_layer.weight".

    Raises:
        AdapterError: it is not the name of a LoRA tensor.
    """
    if is_head(tensor):
        return HEAD, "weight"
    match = _TENSOR_NAME.fullmatch(tensor)
    head = _OTHER_HEAD.match(tensor)
    if head is not None:
        raise AdapterError(
            name, f"it brings a classifier, {head['head']!r}, and of these only '{HEAD}.weight' (SEQ_CLS) is supported"
        )
    if match is None:
        raise AdapterError(name, f"tensor {tensor[:200]!r} is not one of a LoRA adapter for a decoder")
    own, usual = prefixes_of(tensor)
    module = usual + match["module"].removeprefix(own)
    # PEFT wraps a targeted module, so the module's own bias is one level deeper.
    part = match["part"].removeprefix("token_adapter.")
    return module, "bias" if part == "base_layer.bias" else part


def is_head(tensor: str) -> bool:
    """Tell whether a tensor, by its name, is the weight of a classifier: [labels, hidden]."""
    return _HEAD_WEIGHT.fullmatch(tensor) is not None


def prefixes_of(tensor: str) -> tuple[str, str]:
    """Return the prefix of a tensor's module name, and the prefix that replaces it in a whole decoder."""
    name = tensor.removeprefix("base_model.model.")
    return next(
        (prefixes for beginning, prefixes in _BY_BEGINNING.items() if name.startswith(beginning)), WHOLE_DECODER
    )


def parse_module_name(module: str) -> tuple[int, str] | None:
    """Split `model.layers.3.self_attn.q_proj` into (3, "q_proj"); None for what is no module of a decoder.

    Modules that occur once in the model have `WHOLE_MODEL` instead of a layer index. An expert that all tokens meet
    stands for an MLP, and a router is (3, "router"), whatever its name. What is not in every decoder keeps its path
    within the layer, as "linear_attn.in_proj_qkv".
    """
    if module in MODEL_MODULES:
        return WHOLE_MODEL, MODEL_MODULES[module]
    match = _LAYER_MODULE.fullmatch(module)
    if match is None:
        return None
    name = ROUTER if match["router"] else match["attention"] or match["mlp"] or match["norm"] or match["path"]
    return int(match["layer"]), name
