"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864): parse the angles from a configuration.

`engine.decoder.rope_table` builds the tensors, so that reading a configuration needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.errors import CheckpointError

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_KIND_BY_OLD_NAME = {"su": "longrope", "mrope": "default"}
"""Angles of "mrope" differ in images and videos only."""
ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Angles of position p in dimension pair i: p * frequency(i).

    Attributes:
        theta: base of the geometric series of frequencies.
        kind: "default", which also covers "dynamic" within the original context; "linear" (positions divided by
            `factor`; Chen et al., 2023, arXiv 2306.15595); "llama3" (low frequencies divided by `factor`, high ones
            kept, smooth between; Llama 3.1 model card); "yarn" (the same with a ramp over dimensions, and sharper
            attention; Peng et al., 2023, arXiv 2309.00071, sections 3.2 and 3.4); "longrope" (a separate divisor for
            each frequency; Ding et al., 2024, arXiv 2402.13753), short factors only; "none" (all angles are 0).
        original_max_len: context in tokens that the model was trained on before scaling.
        beta_fast, beta_slow: rotations over that context: yarn keeps a frequency above `beta_fast`, and divides it
            below `beta_slow`.
        truncates: yarn's ramp begins and ends at whole dimensions.
        magnitude: factor of cosines and sines.
        factors: longrope's divisors.
        fraction: fraction of each head's dimensions, the first ones, that are rotated.
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
    factors: tuple[float, ...] = ()
    fraction: float = 1.0

    @property
    def max_len(self) -> int:
        """Context in tokens after yarn scaling, 0 for other kinds."""
        return int(self.factor * self.original_max_len) if self.kind == "yarn" else 0

    @property
    def bound(self) -> int | None:
        """Context in tokens beyond which longrope would need other angles, None for other kinds."""
        return self.original_max_len if self.kind == "longrope" else None

    def rotary_dim(self, head_dim: int) -> int:
        """Return how many dimensions of a head are rotated."""
        return int(head_dim * self.fraction)


NO_ROPE = RopeSpec(theta=1.0, kind="none")


def parse_rope(config: Mapping[str, object], where: str) -> RopeSpec:
    """Parse the rotary settings of a config.json, old (rope_theta, rope_scaling) or new (rope_parameters).

    Raises:
        CheckpointError: the scaling type is unknown, one of its numbers is missing or out of range, or both forms are
            present and differ.
    """
    blocks = [block for name in ("rope_parameters", "rope_scaling") if (block := config.get(name))]
    specs = {_parse_block(config, block, where) for block in blocks or [{}]}
    if len(specs) > 1:
        raise CheckpointError(f"{where}: rope_parameters and rope_scaling say different things; leave one of them out.")
    return specs.pop()


def _parse_block(config: Mapping[str, object], block: object, where: str) -> RopeSpec:
    if not isinstance(block, Mapping) or any(isinstance(value, Mapping) for value in block.values()):
        raise CheckpointError(f"{where}: rope_parameters must be one object, the same for all layers.")
    kind = str(block.get("rope_type") or block.get("type") or "default")
    kind = _KIND_BY_OLD_NAME.get(kind, kind)
    if kind not in KINDS:
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported; known are {', '.join(KINDS)}.")
    beside = _present(config)
    usual = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0, ORIGINAL: beside.get("max_position_embeddings")}
    fields = usual | {name: beside[name] for name in usual if name in beside} | _present(block)
    fields["truncate"] = block.get("truncate", True)
    fields["max_position_embeddings"] = beside.get("max_position_embeddings")
    if ORIGINAL in beside:
        fields[ORIGINAL] = beside[ORIGINAL]
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
    theta, fraction = _number(fields, "rope_theta"), _number(fields, "partial_rotary_factor")
    if fraction > 1:
        raise ValueError(f"partial_rotary_factor {fraction:g} is more than 1.")
    return replace(_whole_spec(kind, theta, fields), fraction=fraction)


def _whole_spec(kind: str, theta: float, fields: Mapping[str, object]) -> RopeSpec:
    if kind in ("default", "dynamic"):
        # "dynamic" changes angles only beyond max_position_embeddings, which is never exceeded.
        return RopeSpec(theta=theta)
    if kind == "longrope":
        return _longrope(theta, fields)
    factor = _number(fields, "factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    original = int(_number(fields, ORIGINAL))
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
        truncates=_switch(fields, "truncate"),
        magnitude=_yarn_magnitude(factor, fields),
    )


def _longrope(theta: float, fields: Mapping[str, object]) -> RopeSpec:
    original = _number(fields, ORIGINAL)
    factors = fields["short_factor"]
    if not isinstance(factors, list):
        raise ValueError(f"short_factor must be a list of numbers, it is {factors!r}.")
    usual: dict[str, object] = {"factor": _number(fields, "max_position_embeddings") / original}
    factor = _number({**usual, **fields}, "factor")
    usual["attention_factor"] = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeSpec(
        theta=theta,
        kind="longrope",
        original_max_len=int(original),
        magnitude=_number({**usual, **fields}, "attention_factor"),
        factors=tuple(_number({"short_factor": each}, "short_factor") for each in factors),
    )


def _yarn_magnitude(factor: float, fields: Mapping[str, object]) -> float:
    if "attention_factor" in fields:
        return _number(fields, "attention_factor")

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if fields.get("mscale") and fields.get("mscale_all_dim"):
        return scale(_number(fields, "mscale")) / scale(_number(fields, "mscale_all_dim"))
    return scale(1.0)


def _switch(fields: Mapping[str, object], name: str) -> bool:
    value = fields[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, it is {value!r}.")
    return value


def _number(fields: Mapping[str, object], name: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ValueError(f"{name} must be a positive number, it is {value!r}.")
    return float(value)
