"""Experts of gpt-oss in MXFP4, packed number by number as the format is described, and what they stand for."""

from __future__ import annotations

import torch

VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def quantize(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return blocks and scales of experts [experts, in, out], and the numbers [experts, in, out] they stand for."""
    rows = weight.transpose(1, 2).contiguous()
    groups = rows.unflatten(-1, (-1, 32))
    exponents = groups.abs().amax(-1).clamp(min=1e-6).log2().floor() - 2
    steps = groups / exponents.exp2().unsqueeze(-1)
    levels = (steps.unsqueeze(-1) - torch.tensor(VALUES)).abs().argmin(-1)
    numbers = torch.tensor(VALUES)[levels] * exponents.exp2().unsqueeze(-1)
    blocks = (levels[..., 0::2] | levels[..., 1::2] << 4).to(torch.uint8)
    scales = (exponents + 127).to(torch.uint8)
    return {"blocks": blocks, "scales": scales}, numbers.flatten(-2).transpose(1, 2).contiguous()


def quantize_experts(
    tensors: dict[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return a checkpoint whose experts are stored so, and one that has the numbers that they stand for."""
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = meant[name] = tensor
            continue
        parts, meant[name] = quantize(tensor.float())
        stored |= {f"{name}_{part}": packed for part, packed in parts.items()}
    return stored, meant
