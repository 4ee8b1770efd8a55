"""Checkpoints of 8-bit floats as their formats are described, and what they stand for in plain torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tests.engine.checkpoint_folder import quantize_each

BLOCK = (16, 24)
NUMBER = {"num_bits": 8, "type": "float", "symmetric": True, "observer_kwargs": {}, "actorder": None}


def compressed(strategy: str, inputs: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    group = {
        "targets": ["Linear"],
        "weights": NUMBER | {"strategy": strategy, "dynamic": False, "block_structure": None} | weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "sparsity_config": {},
        "transform_config": {},
    }


TOKEN = NUMBER | {"strategy": "token", "dynamic": True}
STATIC = NUMBER | {"strategy": "tensor", "dynamic": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "channel": compressed("channel", TOKEN),
    "tensor": compressed("tensor", STATIC),
    "naive": compressed("tensor", STATIC) | {"format": "naive-quantized", "quantization_status": "frozen"},
    "weights-only": compressed("channel", None),
    "block": compressed("block", TOKEN, block_structure=list(BLOCK)),
    "fp8": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fp8-transformers": {
        "quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None,
        "modules_to_not_convert": ["lm_head"],
    },
    "fp8-block": {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK),
    },
}  # fmt: skip


def quantize(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a weight [out, in] by their names' ends, and the numbers [out, in] that they stand for."""
    out, depth = weight.shape
    if "block" in kind:
        rows, columns = BLOCK
        padded = torch.zeros(-(-out // rows) * rows, -(-depth // columns) * columns)
        padded[:out, :depth] = weight
        spans = padded.view(len(padded) // rows, rows, -1, columns).abs().amax(dim=(1, 3))
        scale = (spans / 448).bfloat16()
        each = torch.kron(scale.float(), torch.ones(rows, columns))[:out, :depth]
    elif kind in ("channel", "weights-only"):
        scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
        each = scale.float()
    else:
        scale = weight.abs().max().view(() if kind.startswith("fp8") else (1,)) / 448
        each = scale
    held = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    tensors = {"weight": held, "weight_scale_inv" if kind.startswith("fp8-") else "weight_scale": scale}
    if kind in ("tensor", "naive", "fp8"):
        tensors["input_scale"] = torch.tensor([0.5])
    if kind == "fp8-transformers":
        tensors["activation_scale"] = torch.tensor(0.5)
    return tensors, held.float() * each


def quantize_layers(
    tensors: dict[str, torch.Tensor], kind: str, kept: tuple[str, ...] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """As `quantize_each`."""
    return quantize_each(tensors, partial(quantize, kind=kind), kept)
