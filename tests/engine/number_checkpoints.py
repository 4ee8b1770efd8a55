"""Checkpoints of few bits that become numbers, packed number by number as their formats are described."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import numpy as np
import torch

from tests.engine.checkpoint_folder import quantize_each

BITSANDBYTES: dict[str, Any] = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": False,
    "llm_int8_skip_modules": None,
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "actorder": None}
FLOATS = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    """What llm-compressor writes into config.json."""
    inputs = weights | {"dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    groups = {"group_0": group}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups, "kv_cache_scheme": None}


CONFIGS: dict[str, dict[str, Any]] = {
    "channel": compressed("int-quantized", **INTEGERS, strategy="channel"),
    "tensor": compressed("int-quantized", **INTEGERS, strategy="tensor"),
    "naive": compressed("naive-quantized", **INTEGERS, strategy="channel"),
    "bnb8": BITSANDBYTES | {"load_in_4bit": False, "load_in_8bit": True},
    "nf4": BITSANDBYTES,
    "nf4-nested": BITSANDBYTES | {"bnb_4bit_use_double_quant": True},
    "fp4": BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"},
    "nvfp4": compressed("nvfp4-pack-quantized", **FLOATS, dynamic=False),
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
}


def quantize(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a weight [out, in] by their names' ends, and the numbers [out, in] that they stand for."""
    if kind in ("channel", "tensor", "naive", "bnb8"):
        return _integers(weight, kind)
    tensors, numbers = _floats(weight.numpy(), kind) if kind in ("nvfp4", "modelopt") else _blocks(weight.numpy(), kind)
    return tensors, torch.from_numpy(numbers)


def _integers(weight: torch.Tensor, kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    spans = weight.abs().amax(dim=1, keepdim=True) if kind != "tensor" else weight.abs().max().view(1)
    levels = (weight / spans * 127).round().to(torch.int8)
    if kind == "bnb8":
        beside = {"SCB": spans.flatten(), "weight_format": torch.tensor(0, dtype=torch.uint8)}
        return {"weight": levels, **beside}, levels * (spans / 127)
    scale = (spans / 127).bfloat16()
    return {"weight": levels, "weight_scale": scale}, levels * scale.float()


def _floats(weight: np.ndarray, kind: str) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    out, depth = weight.shape
    whole = np.float32(np.abs(weight).max() / (448 * 6))
    held = np.zeros((out, depth // 2), dtype=np.uint8)
    scales = torch.zeros(out, depth // 16, dtype=torch.float8_e4m3fn)
    numbers = np.zeros_like(weight)
    for row in range(out):
        for group in range(depth // 16):
            span = np.abs(weight[row, 16 * group : 16 * group + 16]).max()
            scales[row, group] = float(span / 6 / whole)
            scale = np.float32(scales[row, group].float().item()) * whole
            for column in range(16 * group, 16 * group + 16):
                level = int(np.abs(np.array(E2M1) * scale - weight[row, column]).argmin())
                held[row, column // 2] |= level << (4 * (column % 2))
                numbers[row, column] = np.float32(E2M1[level]) * scale
    if kind == "modelopt":
        beside = {"weight_scale_2": torch.tensor(whole), "input_scale": torch.tensor(0.5)}
        return {"weight": torch.from_numpy(held), "weight_scale": scales, **beside}, numbers
    # As it is divided by, a scale that no power of two would be rounded.
    beside = {"weight_global_scale": torch.tensor([1 / whole]), "input_global_scale": torch.tensor([2.0])}
    return {"weight_packed": torch.from_numpy(held), "weight_scale": scales, **beside}, numbers


def _blocks(weight: np.ndarray, kind: str) -> tuple[dict[str, torch.Tensor], np.ndarray]:
    flat = weight.flatten()
    code = np.linspace(-1, 1, 16).astype(np.float32) ** 3
    num_blocks = -(-len(flat) // 64)
    spans = np.array([np.abs(flat[64 * block : 64 * block + 64]).max() for block in range(num_blocks)])
    state: dict[str, Any] = {"quant_type": kind[:3], "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    tensors = {"weight.quant_map": torch.from_numpy(code)}
    if kind == "nf4-nested":
        offset = float(spans.mean())
        nested_code = np.linspace(-1, 1, 256).astype(np.float32)
        shared = np.array([np.abs(spans[at : at + 256] - offset).max() for at in range(0, num_blocks, 256)])
        eights = [int(np.abs(nested_code * shared[b // 256] + offset - span).argmin()) for b, span in enumerate(spans)]
        spans = np.array(
            [nested_code[e] * np.float32(shared[b // 256]) + np.float32(offset) for b, e in enumerate(eights)]
        )
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors["weight.absmax"] = torch.tensor(eights, dtype=torch.uint8)
        tensors["weight.nested_absmax"] = torch.tensor(shared, dtype=torch.float32)
        tensors["weight.nested_quant_map"] = torch.from_numpy(nested_code)
    else:
        tensors["weight.absmax"] = torch.tensor(spans, dtype=torch.float32)
    held = np.zeros((-(-len(flat) // 2), 1), dtype=np.uint8)
    numbers = np.zeros_like(flat)
    for index, number in enumerate(flat):
        span = np.float32(spans[index // 64])
        level = int(np.abs(code * span - number).argmin())
        held[index // 2, 0] |= level << (4 if index % 2 == 0 else 0)
        numbers[index] = code[level] * span
    tensors["weight"] = torch.from_numpy(held)
    told = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    tensors[f"weight.quant_state.bitsandbytes__{kind[:3]}"] = told
    return tensors, numbers.reshape(weight.shape)


def quantize_layers(
    tensors: dict[str, torch.Tensor], kind: str, kept: tuple[str, ...] = ()
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """As `quantize_each`."""
    return quantize_each(tensors, partial(quantize, kind=kind), kept)
