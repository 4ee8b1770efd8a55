"""Adapters made by hand in PEFT's layout, for a base of two small layers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from adapters.loading import BaseTensors
from adapters.weights import AdapterWeights, Extras, RawAdapter, RawProjection

HIDDEN, KV, INNER = 16, 8, 24
MODULES = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KV),
    "self_attn.v_proj": (HIDDEN, KV),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
LINEAR_SHAPES = {f"model.layers.{layer}.{module}": shape for layer in range(2) for module, shape in MODULES.items()}

VOCAB = 32
SHAPES: dict[str, tuple[int, ...]] = {
    **LINEAR_SHAPES,
    "model.layers.0.self_attn.q_proj.bias": (HIDDEN,),
    "model.layers.0.input_layernorm": (HIDDEN,),
    "model.norm": (HIDDEN,),
    "model.embed_tokens": (VOCAB, HIDDEN),
    "lm_head": (HIDDEN, VOCAB),
}


def make_config(**changes: Any) -> dict[str, Any]:
    return {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "target_modules": ["q_proj"], **changes}


def make_tensors(
    targets: tuple[str, ...] = ("q_proj",), rank: int = 4, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (in_features, out_features) in LINEAR_SHAPES.items():
        if module.endswith(targets):
            prefix = f"base_model.model.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator).to(dtype)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator).to(dtype)
    return tensors


def opens(base: BaseTensors) -> Callable[[], AbstractContextManager[BaseTensors]]:
    """The base's tensors as `AdapterLoader` opens them."""
    return lambda: nullcontext(base)


def write(folder: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(make_config() if config is None else config))
    save_file(make_tensors() if tensors is None else tensors, str(folder / "adapter_model.safetensors"))
    return str(folder)


def write_tokenizer(folder: Path, added: dict[str, int]) -> Path:
    """Write a tokenizer.json with the words `a` and `b`, and with added tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokens = [{"id": token_id, "content": token} for token, token_id in added.items()]
    content = {"added_tokens": tokens, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}}}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


HOLE_BYTES = 256 << 20


def write_a_hole(folder: Path) -> None:
    """Write an adapter that fits nothing, and whose one tensor is a hole in its file."""
    write(folder)
    shape = [HOLE_BYTES // 4]
    header = json.dumps({"model.huge.weight": {"dtype": "F32", "shape": shape, "data_offsets": [0, HOLE_BYTES]}})
    with open(folder / "adapter_model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header.encode())
        file.truncate(8 + len(header) + HOLE_BYTES)


def packed(
    raw: dict[tuple[int, str], RawProjection], dtype: torch.dtype, extras: Extras | None = None
) -> AdapterWeights:
    return RawAdapter(projections=raw, dtype=dtype, extras=extras or Extras()).scaled()
