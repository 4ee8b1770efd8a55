"""Builds cosine and sine tables for an `engine.decoder.rope.RopeSpec`."""

from __future__ import annotations

import math

import torch

from engine.decoder.rope import RopeSpec


def rope_table(spec: RopeSpec, head_dim: int, max_len: int, dtype: torch.dtype) -> torch.Tensor:
    """Return cosines and sines [max_len, 2, head_dim]; both halves of the rotated dimensions have the same angles."""
    rotary_dim = spec.rotary_dim(head_dim)
    angles = torch.outer(torch.arange(max_len, dtype=torch.float32), _frequencies(spec, rotary_dim))
    doubled = torch.cat((angles, angles), dim=-1)
    table = (torch.stack((doubled.cos(), doubled.sin()), dim=1) * spec.magnitude).to(dtype)
    if rotary_dim == head_dim:
        return table
    still = torch.tensor([1.0, 0.0], dtype=dtype).view(1, 2, 1).expand(max_len, 2, head_dim - rotary_dim)
    return torch.cat((table, still), dim=-1)


def _frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the frequencies, float32 [head_dim / 2]."""
    if spec.kind == "none":
        return torch.zeros(head_dim // 2)
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    plain = 1.0 / (spec.theta**exponents)
    if spec.kind == "linear":
        return plain / spec.factor
    if spec.kind == "longrope":
        return 1.0 / (torch.tensor(spec.factors) * spec.theta**exponents)
    if spec.kind == "llama3":
        return _llama3(spec, plain)
    if spec.kind == "yarn":
        return _yarn(spec, plain, head_dim)
    return plain


def _llama3(spec: RopeSpec, plain: torch.Tensor) -> torch.Tensor:
    wavelength = 2 * math.pi / plain
    longest, shortest = spec.original_max_len / spec.low_freq_factor, spec.original_max_len / spec.high_freq_factor
    smooth = (spec.original_max_len / wavelength - spec.low_freq_factor) / (
        spec.high_freq_factor - spec.low_freq_factor
    )
    between = (1 - smooth) * plain / spec.factor + smooth * plain
    scaled = torch.where(wavelength > longest, plain / spec.factor, plain)
    return torch.where((wavelength <= longest) & (wavelength >= shortest), between, scaled)


def _yarn(spec: RopeSpec, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    def dimension_of(rotations: float) -> float:
        return head_dim * math.log(spec.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low, high = dimension_of(spec.beta_fast), dimension_of(spec.beta_slow)
    if spec.truncates:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
    divided = ramp.clamp(0, 1)
    return plain / spec.factor * divided + plain * (1 - divided)
