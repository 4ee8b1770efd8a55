"""Adapters of models whose steps cannot be recorded, by our compiled kernels, each called as needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import torch

from engine.adapter_tables import entry_of, num_entries, product_entry
from engine.cpu.native_lora import PanelAdapter, padded_rank, table_of
from engine.lora import AdapterSegment, LoraBatch, cut_segments
from kernels.experts.reference import Part
from kernels.program import Pool


class CalledLora(LoraBatch):
    """A `LoraBatch` whose adapters are `PanelAdapter`s of linear modules and experts.

    Args:
        entries: as in `engine.adapter_tables.entry_of`.
    """

    def __init__(
        self, pool: Pool, dtype: torch.dtype, entries: Sequence[str], segments: Sequence[AdapterSegment]
    ) -> None:
        super().__init__(segments)
        self._pool = pool
        self._dtype = dtype
        self._entries = entries
        self._table = table_of(segments)
        adapters = [segment.weights for segment in segments if isinstance(segment.weights, PanelAdapter)]
        self._changed = frozenset[int]().union(*(adapter.changed for adapter in set(adapters)))
        self._max_rank = padded_rank(max((adapter.max_rank for adapter in adapters), default=0))

    def multiply(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        layer: int,
        modules: Sequence[str],
        splits: Sequence[int],
    ) -> torch.Tensor:
        """Shrink and expand for all modules and adapters at once."""
        y, count = product(x), len(modules)
        entry = entry_of(layer, modules[0], self._entries)
        if self._changed.isdisjoint(range(entry, entry + count)):
            return y
        sizes, num_segments = (entry, count, self._max_rank, *splits), self._table.shape[0]
        shrunk = x.new_empty(x.shape[0] * count * self._max_rank)
        self._pool.call("lora_shrink", self._dtype, num_segments, (x, self._table, shrunk), (x.shape[1], *sizes))
        self._pool.call("lora_expand", self._dtype, num_segments, (shrunk, self._table, y), (y.shape[1], *sizes))
        return y

    def of_tokens(self, start: int, end: int) -> CalledLora:
        """Cut the segments."""
        return CalledLora(self._pool, self._dtype, self._entries, cut_segments(self._segments, start, end))

    def change_experts(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        rows: torch.Tensor,
        groups: torch.Tensor,
        *,
        layer: int,
        num_experts: int,
        part: Part,
    ) -> None:
        """Add the adapters' part of a product of a layer's experts, as `NativeLora.change_experts` records it."""
        table, num_pairs = self._expert_table, torch.tensor([rows.shape[0]])
        shrunk, between = y.new_empty(rows.shape[0] * 2 * self._max_rank), (rows, groups, table, num_pairs)
        sizes = (product_entry(layer, part, num_experts), num_entries(part), self._max_rank)
        inputs = (x.shape[1], *sizes, part == "down")
        self._pool.call("expert_shrink", self._dtype, table.shape[0], (x, *between, shrunk), inputs)
        self._pool.call("expert_expand", self._dtype, table.shape[0], (shrunk, *between, y), (y.shape[1], *sizes))

    @cached_property
    def _expert_table(self) -> torch.Tensor:
        return table_of(self._experts, of_experts=True)
