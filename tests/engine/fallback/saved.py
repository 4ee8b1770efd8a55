"""Tiny checkpoints of architectures that have no family of ours, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def config_of(architecture: str, **fields: Any) -> transformers.PretrainedConfig:
    return getattr(transformers, architecture).config_class(**{**SIZES, **fields})


def save(folder: Path, architecture: str = "SeedOssForCausalLM", **fields: Any) -> Path:
    """Save one with random weights, always the same."""
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(config_of(architecture, **fields))
    model.save_pretrained(folder)
    return folder
