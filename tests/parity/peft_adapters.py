"""Adapters made with peft on a tiny random base: other ranks, targets and scalings each, B random instead of zero."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

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
    "regex": {"r": 1, "lora_alpha": 3, "target_modules": r".*\.self_attn\.(k|o)_proj"},
    "everything": {
        "r": 6,
        "lora_alpha": 5,
        "use_rslora": True,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
        "rank_pattern": {"down_proj": 12},
        "alpha_pattern": {r"layers\.1\..*": 9},
    },
}


def save_adapters(base: PreTrainedModel, folder: Path) -> dict[str, str]:
    """Save one adapter for each of `CONFIGS`; return their folders by name. The base is left as it was."""
    path_by_name = {}
    for index, (name, options) in enumerate(CONFIGS.items()):
        torch.manual_seed(100 + index)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        path_by_name[name] = str(folder / name)
        model.save_pretrained(path_by_name[name])
        model.unload()
    return path_by_name


def load_adapters(base: PreTrainedModel, path_by_name: dict[str, str]) -> peft.PeftModel:
    """Load saved adapters the way their users do."""
    names = iter(path_by_name.items())
    first, path = next(names)
    model = peft.PeftModel.from_pretrained(base, path, adapter_name=first)
    for name, path in names:
        model.load_adapter(path, adapter_name=name)
    return model.eval()
