"""Segments and projections as the LoRA kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.packed_linear.reference import to_panels

Adapter = Sequence[tuple[torch.Tensor, torch.Tensor] | None]
"""(a [rank, in], b [out, rank]) of each module, None where the adapter leaves it alone."""


class Segments:
    """Adapters' tables and the segments of a batch; alive as long as the kernels read them."""

    def __init__(self, adapters: Sequence[tuple[Adapter, int, int]]) -> None:
        self._kept: list[torch.Tensor] = []
        rows = []
        for adapter, start, end in adapters:
            table = torch.tensor([[0, 0, 0] if pair is None else self._row(*pair) for pair in adapter])
            self._kept.append(table)
            rows.append([start, end, table.data_ptr()])
        self.tensor = torch.tensor(rows)

    def _row(self, a: torch.Tensor, b: torch.Tensor) -> list[int]:
        kept = [a.contiguous(), to_panels(b)]
        self._kept.extend(kept)
        return [kept[0].data_ptr(), kept[1].data_ptr(), a.shape[0]]
