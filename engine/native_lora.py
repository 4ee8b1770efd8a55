"""Adapters as the CPU kernels read them, and their products as ops of a recorded step.

    table of an adapter    [ layer 0: q k v o gate up down | layer 1: ... ]    (address of A, address of B, rank) each
    segments of a step     (first token, end, address of a table) each

Nothing is gathered and nothing padded to a common rank: a step writes three numbers for each segment.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.weights import AdapterWeights
from engine.errors import EngineError
from engine.lora import MODULES, AdapterSegment
from kernels.packed_linear.reference import panel_numel, to_panels
from kernels.program import Program


class PanelAdapter(AdapterWeights):
    """An adapter whose B's are in panels, and its table.

    Attributes:
        table: [layers, 7, 3] int64; valid as long as this object lives.
    """

    def __init__(self, source: AdapterWeights, num_layers: int) -> None:
        found = [
            (layer, index, projection)
            for layer in range(num_layers)
            for index, module in enumerate(MODULES)
            if (projection := source.projection(layer, module)) is not None
        ]
        dtype = source.flat.dtype
        sizes = [(item.a.numel(), panel_numel(item.b.shape, dtype)) for _, _, item in found]
        flat = torch.empty(sum(map(sum, sizes)), dtype=dtype)
        self.table = torch.zeros(num_layers, len(MODULES), 3, dtype=torch.int64)
        at = 0
        for (layer, index, item), (a_size, b_size) in zip(found, sizes, strict=True):
            a, b = flat[at : at + a_size], flat[at + a_size : at + a_size + b_size]
            a.copy_(item.a.flatten())
            b.copy_(to_panels(item.b).flatten())
            self.table[layer, index] = torch.tensor([a.data_ptr(), b.data_ptr(), item.a.shape[0]])
            at += a_size + b_size
        super().__init__(flat, ())


class NativeLora:
    """`LoraProducts` that record themselves; `fill` says which adapters a step has.

    Args:
        count: int64 [1], where the number of segments is written for the kernels.
    """

    def __init__(self, program: Program, dtype: torch.dtype, max_rank: int, count: torch.Tensor) -> None:
        self._program = program
        self._dtype = dtype
        # An odd rank is shrunk into one number more.
        self._max_rank = max_rank + max_rank % 2
        self._count = count

    def begin(self, max_segments: int, max_tokens: int) -> None:
        """Make room for the largest step."""
        self._segments = torch.zeros(max_segments, 3, dtype=torch.int64)
        self._shrunk = torch.empty(max_tokens * 3 * self._max_rank, dtype=self._dtype)

    def fill(self, segments: Sequence[AdapterSegment]) -> None:
        """Write a step's segments; their adapters stay where they are until it has run.

        Raises:
            EngineError: an adapter was not laid out for the kernels.
        """
        self._count[0] = len(segments)
        for index, segment in enumerate(segments):
            if not isinstance(segment.weights, PanelAdapter):
                raise EngineError("an adapter reached the kernels without having been laid out for them")
            self._segments[index] = torch.tensor([segment.start, segment.end, segment.weights.table.data_ptr()])

    def apply(self, layer: int, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Record the product of one module."""
        self.apply_fused(layer, (module,), x, y, (y.shape[1],))

    def apply_fused(
        self, layer: int, modules: Sequence[str], x: torch.Tensor, y: torch.Tensor, splits: Sequence[int]
    ) -> None:
        """Record the products of neighbouring modules: one shrink, one expand."""
        sizes = (layer * len(MODULES) + MODULES.index(modules[0]), len(modules), self._max_rank)
        for name, tensors, more in (
            ("lora_shrink", (x, self._segments, self._shrunk), (x.shape[1], *sizes)),
            ("lora_expand", (self._shrunk, self._segments, y), (y.shape[1], *sizes, *splits)),
        ):
            self._program.add(name, self._dtype, self._count, tensors, more)
