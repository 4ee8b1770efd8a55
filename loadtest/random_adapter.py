"""Writes adapters of random numbers that fit a checkpoint, as PEFT saves them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

FLOAT_BYTES = 4


def linear_shapes(model_path: str) -> dict[str, tuple[int, int]]:
    """Return (in, out) features of every linear layer of a model with gated MLPs, by its full name."""
    config: Mapping[str, Any] = json.loads((Path(model_path) / "config.json").read_text())
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head = config.get("head_dim") or hidden // heads
    queries, keys = heads * head, config.get("num_key_value_heads", heads) * head
    modules = {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inner),
        "mlp.up_proj": (hidden, inner),
        "mlp.down_proj": (inner, hidden),
    }
    return {
        f"model.layers.{layer}.{module}": shape
        for layer in range(config["num_hidden_layers"])
        for module, shape in modules.items()
    }


def rank_of_size(model_path: str, num_bytes: int) -> int:
    """Return the rank at which an adapter of all linear layers has about this size in float32."""
    return max(1, round(num_bytes / FLOAT_BYTES / sum(map(sum, linear_shapes(model_path).values()))))


def write_adapter(folder: Path, model_path: str, *, rank: int, seed: int) -> None:
    """Write an adapter of all linear layers in float32."""
    shapes = linear_shapes(model_path)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (in_features, out_features) in shapes.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * 0.01
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * 0.01
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
