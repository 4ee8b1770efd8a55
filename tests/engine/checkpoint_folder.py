"""A tiny checkpoint written by hand, so that a test can break it where it likes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.decoder.model_spec import ModelSpec
from engine.decoder.reading import read_spec
from engine.loading.checkpoint import tensor_reader
from engine.loading.names import parameters

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def write_config(folder: Path, **changes: Any) -> str:
    """Write config.json; a change to None removes the field."""
    fields = {name: value for name, value in {**CONFIG, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(fields))
    return str(folder)


def random_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor that the folder's config.json asks for."""
    torch.manual_seed(0)
    parts = [part for parameter in parameters(read_spec(str(folder))) for part in parameter.parts]
    return {name: torch.randn(shape) * 0.2 for name, shape in parts}


def write_checkpoint(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Write a whole checkpoint and return its tensors."""
    write_config(folder, **changes)
    tensors = random_tensors(folder)
    save_file(tensors, folder / "model.safetensors")
    return tensors


def read_tensor(folder: str, spec: ModelSpec, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Read one tensor as adapters that need it do."""
    with tensor_reader(folder, spec) as read:
        return read(name, dtype)


def quantize_each(
    tensors: dict[str, torch.Tensor],
    quantize: Callable[[torch.Tensor], tuple[dict[str, torch.Tensor], torch.Tensor]],
    kept: tuple[str, ...] = (),
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Quantize the linear modules of a checkpoint's layers but those `kept`; return its tensors and what they mean."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if not name.endswith("_proj.weight") or module.endswith(kept or ("nothing",)):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = quantize(tensor.float())
        stored |= {f"{module}.{part}": held for part, held in parts.items()}
    return stored, meant


def write_stored(
    folder: Path,
    quantize: Callable[[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]],
    quantization: dict[str, Any],
    more: dict[str, torch.Tensor],
    **fields: Any,
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of few bits, with `more` tensors; return the tensors that it stands for."""
    write_config(folder, **fields)
    stored, meant = quantize(random_tensors(folder))
    write_config(folder, **fields, quantization_config=quantization)
    save_file(stored | more, folder / "model.safetensors")
    return meant
