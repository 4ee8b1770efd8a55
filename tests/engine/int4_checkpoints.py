"""Checkpoints of 4-bit weights, packed number by number as their formats are described, and what they stand for."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch

from tests.engine.checkpoint_folder import quantize_each

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The first lies in the lowest bits."""

CONFIGS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": False},
    "gptq_v2": {
        "quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "checkpoint_format": "gptq_v2",
    },
}  # fmt: skip


IS_SYMMETRIC_BY_KIND = {"packed": False, "packed-symmetric": True}
"""Of compressed-tensors."""
KINDS = (*CONFIGS, *IS_SYMMETRIC_BY_KIND)


def config_of(kind: str, group: int = 128, **weights: Any) -> dict[str, Any]:
    """Return what stands in config.json of a checkpoint whose groups have so many inputs."""
    if kind in CONFIGS:
        return {**CONFIGS[kind], "group_size": group}
    told = {"num_bits": 4, "type": "int", "symmetric": IS_SYMMETRIC_BY_KIND[kind], "dynamic": False, "actorder": None}
    told |= {"strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group}
    groups = {"group_0": {"targets": ["Linear"], "weights": told | weights, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def packed_rows(numbers: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack [rows, 8 * n] into [rows, n] numbers of 32 bits."""
    out = np.zeros((numbers.shape[0], numbers.shape[1] // 8), dtype=np.uint32)
    for row in range(out.shape[0]):
        for column in range(out.shape[1]):
            word = 0
            for place, index in enumerate(order):
                word |= int(numbers[row, 8 * column + index]) << (4 * place)
            out[row, column] = word
    return out.view(np.int32)


def quantize(weight: torch.Tensor, kind: str, group: int = 128) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of a weight [out, in] by their names' ends, and the numbers [out, in] that they stand for."""
    out, depth = weight.shape
    group = depth if group == -1 else group
    grouped = weight.numpy().reshape(out, depth // group, group)
    low, high = np.minimum(grouped.min(-1), 0), np.maximum(grouped.max(-1), 0)
    scales = ((high - low) / 15).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 1, 15).astype(np.int64)
    if IS_SYMMETRIC_BY_KIND.get(kind, False):
        zeros[:] = 8
    levels = np.clip(np.rint(grouped / scales[..., None]) + zeros[..., None], 0, 15).astype(np.int64)
    numbers = (levels - zeros[..., None]).astype(np.float32) * scales.astype(np.float32)[..., None]
    flat = levels.reshape(out, depth)
    if kind in IS_SYMMETRIC_BY_KIND:
        tensors = {"weight_packed": packed_rows(flat), "weight_scale": scales, "weight_shape": np.array([out, depth])}
        if kind == "packed":
            tensors["weight_zero_point"] = packed_rows(zeros.T).T
    elif kind == "awq":
        qweight, qzeros = packed_rows(flat.T, AWQ_ORDER), packed_rows(zeros.T, AWQ_ORDER)
    else:
        qweight, qzeros = packed_rows(flat).T, packed_rows(zeros.T - (kind == "gptq"))
    if kind in CONFIGS:
        tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.T}
    return (
        {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in tensors.items()},
        torch.from_numpy(numbers.reshape(out, depth)),
    )


def quantize_layers(
    tensors: dict[str, torch.Tensor], kind: str, group: int = 128
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """As `quantize_each`."""
    return quantize_each(tensors, partial(quantize, kind=kind, group=group))
