"""Segments and projections as the LoRA kernels read them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.packed_linear.reference import to_panels

Adapter = Sequence[tuple[torch.Tensor, torch.Tensor] | None]
"""(a [rank, in], b [out, rank]) of each module, None where the adapter leaves it alone."""


class Segments:
    """Adapters' tables and the segments of a batch; alive as long as the kernels read them.

    Args:
        columns: (gain, shift) of every module of every adapter, None for none.
        embeds: rows of the transposed A's are what is read, as an embedding's are.
    """

    def __init__(
        self,
        adapters: Sequence[tuple[Adapter, int, int]],
        columns: Sequence[Sequence[tuple[torch.Tensor, torch.Tensor] | None]] | None = None,
        *,
        embeds: bool = False,
    ) -> None:
        self._embeds = embeds
        self._kept: list[torch.Tensor] = []
        rows = []
        for adapter, start, end in adapters:
            table = torch.tensor([[0] * 5 if pair is None else self._row(*pair) for pair in adapter])
            for module, pair in enumerate(columns[len(rows)] if columns else ()):
                if pair is not None:
                    self._kept.extend(pair)
                    table[module, 3:] = torch.tensor([part.data_ptr() for part in pair])
            self._kept.append(table)
            rows.append([start, end, table.data_ptr()])
        self.tensor = torch.tensor(rows)

    def _row(self, a: torch.Tensor, b: torch.Tensor) -> list[int]:
        kept = [(a.T if self._embeds else a).contiguous(), to_panels(b)]
        self._kept.extend(kept)
        return [kept[0].data_ptr(), kept[1].data_ptr(), a.shape[0], 0, 0]
