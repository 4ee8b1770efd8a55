"""How one step's batch uses adapters: segments of tokens, each multiplied by its own adapter at its own rank.

    tokens   0 ...... 5 ...... 9 .......... 20
             [ base  )[ A     )[ B         )

Base tokens enter no product, a module that no adapter of the batch targets costs a dictionary look-up, and a batch
without adapters has no segments and no `LoraProducts` at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from adapters.identity import AdapterDigest
from adapters.weights import AdapterWeights
from kernels.lora_expand.reference import lora_expand
from kernels.lora_shrink.reference import lora_shrink

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""In tables of an adapter's matrices; modules that share an input are neighbours."""

Segment = tuple[AdapterDigest | None, int, int]
"""(adapter or None for the base model, start, end): a half-open range of the batch's tokens."""


class ResidentAdapters(Protocol):
    """Where the matrices of pinned adapters are found; `engine.adapter_pool.AdapterPool` is one."""

    def weights(self, digest: AdapterDigest) -> AdapterWeights:
        """Return the device weights of an adapter that is pinned.

        Raises:
            EngineError: it is not resident; the scheduler let it run without a pin.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSegment:
    """A run of tokens [start, end) of one adapter."""

    weights: AdapterWeights
    start: int
    end: int


def collect_segments(segments: Iterable[Segment], pool: ResidentAdapters) -> tuple[AdapterSegment, ...]:
    """Find the adapters of a batch's segments, neighbours of one adapter joined and those of the base left out.

    Segments must ascend and not overlap; together they need not cover the batch.
    """
    joined: list[tuple[AdapterDigest, int, int]] = []
    for digest, start, end in segments:
        if digest is None or start == end:
            continue
        if joined and joined[-1][0] == digest and joined[-1][2] == start:
            joined[-1] = (digest, joined[-1][1], end)
        else:
            joined.append((digest, start, end))
    return tuple(AdapterSegment(weights=pool.weights(d), start=s, end=e) for d, s, e in joined)


class LoraProducts(Protocol):
    """The adapters' part of a step's linear products."""

    def apply(self, layer: int, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add scaling * (x A^T) B^T in place to `y` [tokens, out], for `x` [tokens, in], segment by segment."""
        ...

    def apply_fused(
        self, layer: int, modules: Sequence[str], x: torch.Tensor, y: torch.Tensor, splits: Sequence[int]
    ) -> None:
        """Do `apply` for modules that share the input, with one shrink.

        `modules` is one of `adapters.weights.FUSED_GROUPS`; `splits` are their output widths, and `y` [tokens, sum of
        splits] holds their outputs side by side in that order.
        """
        ...


class LoraBatch:
    """`LoraProducts` by torch operators. Valid until the step's forward pass ends; engine's thread only."""

    def __init__(self, segments: Sequence[AdapterSegment]) -> None:
        self._segments = tuple(segments)

    def apply(self, layer: int, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Shrink and expand each segment that has the module."""
        found = [
            (projection, (segment.start, segment.end))
            for segment in self._segments
            if (projection := segment.weights.projection(layer, module)) is not None
        ]
        if not found:
            return
        spans = [span for _, span in found]
        shrunk = lora_shrink(x=x, weights=[p.a for p, _ in found], segments=spans)
        lora_expand(y=y, shrunk=shrunk, weights=[p.b for p, _ in found], segments=spans)

    def apply_fused(
        self, layer: int, modules: Sequence[str], x: torch.Tensor, y: torch.Tensor, splits: Sequence[int]
    ) -> None:
        """Shrink each segment once for all modules, and expand each module."""
        found = [
            (group, (segment.start, segment.end))
            for segment in self._segments
            if (group := segment.weights.group(layer, modules)) is not None
        ]
        if not found:
            return
        shrunk = lora_shrink(x=x, weights=[g.a for g, _ in found], segments=[span for _, span in found])
        column = 0
        for module, width in zip(modules, splits, strict=True):
            parts = [
                (h[:, projection.start : projection.end], projection.b, span)
                for h, (group, span) in zip(shrunk, found, strict=True)
                if (projection := group.projection_by_module.get(module)) is not None
            ]
            lora_expand(
                y=y,
                shrunk=[part[0] for part in parts],
                weights=[part[1] for part in parts],
                segments=[part[2] for part in parts],
                column=column,
            )
            column += width
