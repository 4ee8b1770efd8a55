"""Tiny checkpoints of architectures that have no family of ours, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from engine.backend import Backend
from engine.fallback.decoder import FallbackDecoder
from engine.fallback.loading import load_fallback
from engine.fallback.spec import FallbackSpec
from engine.loading.spec import read_model_spec

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


def load(folder: Path, dtype: torch.dtype = torch.float32, backend: Backend | None = None) -> FallbackDecoder:
    """Load a saved one for two requests, by torch's operators unless a backend is given."""
    spec = read_model_spec(str(folder))
    assert isinstance(spec, FallbackSpec)
    return load_fallback(str(folder), spec, backend or Backend(), dtype, torch.device("cpu"), 2)


def save(folder: Path, architecture: str = "SeedOssForCausalLM", **fields: Any) -> Path:
    """Save one with random weights, always the same."""
    torch.manual_seed(3)
    model = getattr(transformers, architecture)(config_of(architecture, **fields))
    model.save_pretrained(folder)
    return folder
