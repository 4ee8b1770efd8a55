"""Write adapters with random weights that fit a checkpoint, in PEFT's format."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from loadtest.geometries import tensor_shapes

FLOAT_BYTES = 4


def linear_shapes(model_path: str) -> dict[str, tuple[int, ...]]:
    """Return (out, in) features of every linear layer of a checkpoint except experts, by its full name."""
    config = json.loads((Path(model_path) / "config.json").read_text())
    shapes = dict(tensor_shapes(config))
    taking = {
        name: shape for name, shape in shapes.items() if name.endswith("_proj.weight") and ".experts." not in name
    }
    return {name.removesuffix(".weight"): shape for name, shape in taking.items()}


def rank_of_size(model_path: str, num_bytes: int) -> int:
    """Return the rank at which an adapter of all linear layers has about this size in float32."""
    return max(1, round(num_bytes / FLOAT_BYTES / sum(map(sum, linear_shapes(model_path).values()))))


def write_adapter(folder: Path, model_path: str, *, rank: int, seed: int) -> None:
    """Write an adapter of all linear layers in float32, with both A and B nonzero."""
    shapes = linear_shapes(model_path)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (out_features, in_features) in shapes.items():
        prefix = f"base_model.model.{module}"
        tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) * 0.01
        tensors[f"{prefix}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) * 0.01
    targets = sorted({module.rpartition(".")[2] for module in shapes})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none", "target_modules": targets}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, str(folder / "adapter_model.safetensors"))
