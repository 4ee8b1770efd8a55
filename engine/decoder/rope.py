"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864): which angles a family's configuration asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.errors import CheckpointError

KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Angles of position p in dimension pair i: p * frequency(i).

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: "default"; "linear" (positions divided by `factor`; Chen et al., 2023, arXiv 2306.15595); "llama3" (low
            frequencies divided by `factor`, high ones kept, smooth between; Llama 3.1 model card); "yarn" (the same by
            a ramp over dimensions, and sharper attention; Peng et al., 2023, arXiv 2309.00071, sections 3.2 and 3.4).
        original_max_len: context in tokens that the model was trained on before scaling.
        beta_fast, beta_slow: rotations over that context above which yarn keeps, below which it divides a frequency.
        truncates: yarn's ramp begins and ends at whole dimensions.
        magnitude: factor of cosines and sines.
    """

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncates: bool = True
    magnitude: float = 1.0

    def frequencies(self, head_dim: int) -> torch.Tensor:
        """Return the frequencies, float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
        plain = 1.0 / (self.theta**exponents)
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            return self._llama3(plain)
        if self.kind == "yarn":
            return self._yarn(plain, head_dim)
        return plain

    def table(self, head_dim: int, max_len: int, dtype: torch.dtype) -> torch.Tensor:
        """Return cosines and sines, [max_len, 2, head_dim]; each half of `head_dim` repeats the same angles."""
        angles = torch.outer(torch.arange(max_len, dtype=torch.float32), self.frequencies(head_dim))
        doubled = torch.cat((angles, angles), dim=-1)
        return (torch.stack((doubled.cos(), doubled.sin()), dim=1) * self.magnitude).to(dtype)

    def _llama3(self, plain: torch.Tensor) -> torch.Tensor:
        wavelength = 2 * math.pi / plain
        longest, shortest = self.original_max_len / self.low_freq_factor, self.original_max_len / self.high_freq_factor
        smooth = (self.original_max_len / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - smooth) * plain / self.factor + smooth * plain
        scaled = torch.where(wavelength > longest, plain / self.factor, plain)
        return torch.where((wavelength <= longest) & (wavelength >= shortest), between, scaled)

    def _yarn(self, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
        def dimension_of(rotations: float) -> float:
            return head_dim * math.log(self.original_max_len / (rotations * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension_of(self.beta_fast), dimension_of(self.beta_slow)
        if self.truncates:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low or 0.001)
        divided = ramp.clamp(0, 1)
        return plain / self.factor * divided + plain * (1 - divided)


def parse_rope(config: Mapping[str, object], where: str) -> RopeSpec:
    """Read the rotary part of a config.json, in the old form (rope_theta, rope_scaling) or the new (rope_parameters).

    Raises:
        CheckpointError: a kind of scaling that is not known, or one of its numbers is missing or out of range.
    """
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(block, Mapping) or any(isinstance(value, Mapping) for value in block.values()):
        raise CheckpointError(f"{where}: rope_parameters must be one object, the same for all layers.")
    kind = str(block.get("rope_type") or block.get("type") or "default")
    if kind not in KINDS:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported; known are {', '.join(KINDS)}.")
    fields = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, **_present(config), **_present(block)}
    try:
        spec = _spec(kind, fields)
    except KeyError as error:
        raise CheckpointError(f"{where}: rope type {kind!r} lacks {error}.") from None
    except ValueError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return spec


def _present(block: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in block.items() if value is not None}


def _spec(kind: str, fields: Mapping[str, object]) -> RopeSpec:
    if _number(fields, "partial_rotary_factor") != 1.0:
        raise ValueError(f"partial_rotary_factor {fields['partial_rotary_factor']} is not supported; only 1 is.")
    theta = _number(fields, "rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    factor = _number(fields, "factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    original = int(_number(fields, "original_max_position_embeddings"))
    if kind == "llama3":
        low, high = _number(fields, "low_freq_factor"), _number(fields, "high_freq_factor")
        if low >= high:
            raise ValueError(f"low_freq_factor {low} must be less than high_freq_factor {high}.")
        return RopeSpec(
            theta=theta, kind=kind, factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_len=original
        )
    return RopeSpec(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_len=original,
        beta_fast=_number({"beta_fast": 32.0, **fields}, "beta_fast"),
        beta_slow=_number({"beta_slow": 1.0, **fields}, "beta_slow"),
        truncates=bool(fields.get("truncate", True)),
        magnitude=_yarn_magnitude(factor, fields),
    )


def _yarn_magnitude(factor: float, fields: Mapping[str, object]) -> float:
    if "attention_factor" in fields:
        return _number(fields, "attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return scale(_number(fields, "mscale")) / scale(_number(fields, "mscale_all_dim"))
    return scale(1.0)


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{name} must be a positive number, it is {value!r}.")
    return float(value)
