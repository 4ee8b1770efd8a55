"""Adapters made with peft on a tiny random base: other ranks, targets and scalings each, B random instead of zero."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from adapters.identity import AdapterRef
from adapters.registry import reference

CONFIGS: dict[str, dict[str, Any]] = {
    "attention": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 16, "lora_alpha": 4, "use_rslora": True, "target_modules": ["o_proj", "down_proj"]},
    "gates": {"r": 2, "lora_alpha": 6, "target_modules": ["gate_proj", "up_proj"]},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj", "k_proj", "up_proj"],
        "rank_pattern": {"k_proj": 3, r"layers\.0\.mlp\.up_proj": 7},
        "alpha_pattern": {"layers.1.self_attn.q_proj": 20, "k_proj": 2},
    },
    "one-layer": {"r": 5, "lora_alpha": 10, "target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]},
    "regex": {
        "r": 1,
        "lora_alpha": 3,
        "target_modules": r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mixer).*?(?:k_proj|o_proj))"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|attn|mixer)\.(?:(?:k_proj|o_proj)))",
    },
    "everything": {
        "r": 6,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"down_proj": 12},
        "alpha_pattern": {r"layers\.1\..*": 9},
    },
}


TOKENS = [121, 4, 106, 9, 63]
"""Tokens with rows of their own, not in ascending order."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
BEYOND_PRODUCTS: dict[str, dict[str, Any]] = {
    "bias-all": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "bias": "all"},
    "bias-of-targets": {"r": 3, "lora_alpha": 6, "target_modules": ATTENTION, "bias": "lora_only"},
    "lora-bias": {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "down_proj"], "lora_bias": True},
    "dora": {"r": 5, "lora_alpha": 10, "target_modules": "all-linear", "use_dora": True},
    "dora-and-biases": {"r": 4, "target_modules": [*ATTENTION, "lm_head"], "use_dora": True, "bias": "all"},
    "head": {"r": 7, "lora_alpha": 7, "target_modules": ["lm_head"]},
    "embedding": {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "embed_tokens"]},
    "embedding-dora": {"r": 3, "lora_alpha": 6, "target_modules": ["v_proj", "embed_tokens"], "use_dora": True},
    "both-ends": {"r": 8, "use_rslora": True, "target_modules": ["embed_tokens", "lm_head", "down_proj"]},
    "norms": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["norm"]},
    "own-ends": {"r": 4, "target_modules": ["gate_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"r": 4, "target_modules": ["q_proj", "up_proj"], "trainable_token_indices": TOKENS},
    "tokens-of-each-end": {
        "r": 3,
        "target_modules": ["v_proj"],
        "trainable_token_indices": {"embed_tokens": TOKENS[:3], "lm_head": TOKENS[2:]},
    },
    "tokens-of-the-head": {"r": 2, "target_modules": ["k_proj"], "trainable_token_indices": {"lm_head": TOKENS}},
}
"""What changes more than linear layers by products."""


FUSED: dict[str, dict[str, Any]] = {
    "fused": {"r": 6, "lora_alpha": 8, "target_modules": ["qkv_proj", "gate_up_proj"], "rank_pattern": {"qkv_proj": 3}},
    "fused-lora-bias": {"r": 4, "lora_alpha": 6, "target_modules": ["qkv_proj", "down_proj"], "lora_bias": True},
    "fused-dora": {"r": 5, "lora_alpha": 10, "target_modules": "all-linear", "use_dora": True},
    "both-ends": BEYOND_PRODUCTS["both-ends"],
    "norms": BEYOND_PRODUCTS["norms"] | {"target_modules": ["o_proj"]},
}
"""For bases in which projections that read the same input are one module."""


BESIDE_EXPERTS: dict[str, dict[str, Any]] = {
    **{name: CONFIGS[name] for name in ("attention", "one-layer", "regex")},
    "lora-bias": {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "o_proj"], "lora_bias": True},
    "dora": {"r": 5, "lora_alpha": 10, "target_modules": ATTENTION, "use_dora": True},
    "head": BEYOND_PRODUCTS["head"],
    "norms": BEYOND_PRODUCTS["norms"],
}
"""For bases with experts, which PEFT adapts where MLPs' projections are named."""


STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS: dict[str, dict[str, Any]] = {
    "router": {"r": 4, "lora_alpha": 8, "target_modules": ["k_proj"], "target_parameters": ["mlp.gate.weight"]},
    "all-experts": {"r": 3, "lora_alpha": 5, "target_modules": ["q_proj", "o_proj"], "target_parameters": STACKS},
    "patterned-experts": {
        "r": 8,
        "lora_alpha": 4,
        "use_rslora": True,
        "target_modules": [],
        "target_parameters": STACKS,
        "rank_pattern": {"down_proj": 5, r"layers\.0\.mlp\.experts\.gate_up_proj": 1},
        "alpha_pattern": {r".*\.gate_up_proj": 6},
    },
    "down-of-experts": {"r": 2, "lora_alpha": 8, "target_modules": ["v_proj"], "target_parameters": STACKS[1:]},
    "gates-of-some-layers": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": [],
        "target_parameters": ["1.mlp.experts.gate_up_proj", "2.mlp.experts.gate_up_proj"],
    },
}
"""Of mixtures, by PEFT's `target_parameters`."""


def save_beyond_products(
    make_base: Callable[[], PreTrainedModel], folder: Path, configs: dict[str, dict[str, Any]] = BEYOND_PRODUCTS
) -> dict[str, str]:
    """Save one adapter for each of `configs`, each of a base of its own, for some change it."""
    path_by_name = {}
    for index, (name, options) in enumerate(configs.items()):
        torch.manual_seed(200 + index)
        model = peft.get_peft_model(make_base(), peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for key, parameter in model.named_parameters():
            if "lora_B" in key or "lora_embedding_A" in key:
                torch.nn.init.normal_(parameter, std=0.3)
            elif parameter.requires_grad and "lora_" not in key and parameter.dim() == 1:
                torch.nn.init.normal_(parameter, 1 if "norm" in key else 0, 0.3)
            elif "magnitude" in key:
                parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
            elif "modules_to_save" in key:
                torch.nn.init.normal_(parameter, std=0.2)
            elif "trainable_tokens" in key:
                # Longer than others, so that they are drawn too.
                torch.nn.init.normal_(parameter, std=0.5)
        path_by_name[name] = str(folder / name)
        model.save_pretrained(path_by_name[name])
    return path_by_name


def save_adapters(base: PreTrainedModel, folder: Path, configs: dict[str, dict[str, Any]] = CONFIGS) -> dict[str, str]:
    """Save one adapter for each of `configs`; return their folders by name. The base is left as it was."""
    path_by_name = {}
    for index, (name, options) in enumerate(configs.items()):
        torch.manual_seed(100 + index)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        path_by_name[name] = str(folder / name)
        model.save_pretrained(path_by_name[name])
        model.unload()
    return path_by_name


def save_classifier(path: str, folder: Path, num_labels: int, **options: Any) -> tuple[AdapterRef, peft.PeftModel]:
    """Save a classifier of the base in `path`, under the name of the folder; return it, and what scores texts."""
    torch.manual_seed(300 + num_labels)
    base = AutoModelForSequenceClassification.from_pretrained(path, num_labels=num_labels, dtype=torch.float32)
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]} | options
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="SEQ_CLS", **options)).eval()
    for key, parameter in model.named_parameters():
        if parameter.requires_grad and "lora_A" not in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    return reference(folder.name, str(folder)), model


@torch.no_grad()
def scores_of(model: peft.PeftModel, prompt: Sequence[int]) -> np.ndarray:
    """Return the raw scores of each label."""
    return np.asarray(model(torch.tensor([prompt])).logits[0])


def saved_adapters(base: PreTrainedModel, folder: Path, *names: str) -> list[AdapterRef]:
    """Save the adapters of these names, of `CONFIGS` or `BEYOND_PRODUCTS`, and no others."""
    path_by_name = save_adapters(base, folder, {name: CONFIGS[name] for name in names if name in CONFIGS})
    beyond = {name: BEYOND_PRODUCTS[name] for name in names if name in BEYOND_PRODUCTS}
    path_by_name |= save_beyond_products(lambda: deepcopy(base), folder, beyond)
    return [reference(name, path_by_name[name]) for name in names]


def load_adapters(base: PreTrainedModel, path_by_name: dict[str, str]) -> peft.PeftModel:
    """Load saved adapters the way their users do."""
    names = iter(path_by_name.items())
    first, path = next(names)
    model = peft.PeftModel.from_pretrained(base, path, adapter_name=first)
    for name, path in names:
        model.load_adapter(path, adapter_name=name)
    return model.eval()


def generated(model: PreTrainedModel | peft.PeftModel, prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """Return what transformers or peft generate greedily for one prompt."""
    ids = torch.tensor([prompt])
    out = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return tuple(out[0, len(prompt) :].tolist())
