"""Adapters as the GPU kernels read them, and their products: one shrink and one expand for all adapters of a step.

    table of an adapter    [ layer 0: q k v o gate up down | layer 1: ... ]    `ENTRY_NUMBERS` each: address of A,
                           address of B, rank, address of gains and shifts of columns, 0 for none
    segments of a step     (first token, end, address of a table) each

A step writes three numbers for each segment; nothing is gathered, and nothing padded to a common rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from adapters.weights import AdapterWeights
from engine.errors import EngineError
from engine.gpu.runtime import GpuRuntime
from engine.gpu.staging import Staging
from engine.lora import MODULES, AdapterSegment, refuse_extras, refuse_magnitudes
from kernels.lora_expand.launch import lora_expand
from kernels.lora_shrink.launch import lora_shrink

ALIGNED_BYTES = 16
"""Where a matrix begins: what the widest load takes."""
ENTRY_NUMBERS = 4
NOWHERE = -1
"""Where what an adapter does not have lies."""


class TabledAdapter(AdapterWeights):
    """An adapter with a table of where its matrices lie.

    Attributes:
        table: [layers * 7, 4] int64, valid as long as this object lives.
    """

    def __init__(self, flat: torch.Tensor, offsets: torch.Tensor, table: torch.Tensor | None = None) -> None:
        super().__init__(flat, ())
        self._offsets = offsets
        self.table = _addressed(flat, offsets) if table is None else table

    @classmethod
    def of(cls, source: AdapterWeights, num_layers: int, quantization: str | None = None) -> TabledAdapter:
        """Lay out an adapter that is in host memory, for a base whose weights may be quantized.

        Raises:
            LayoutError: it changes more than the kernels can.
        """
        refuse_extras(source, "this model runs on a GPU, whose kernels")
        if quantization is not None:
            refuse_magnitudes(source, quantization)
        dtype = source.flat.dtype
        step = ALIGNED_BYTES // dtype.itemsize
        offsets = torch.full((num_layers * len(MODULES), ENTRY_NUMBERS), NOWHERE, dtype=torch.int64)
        parts: list[torch.Tensor] = []
        end = 0
        for entry in range(len(offsets)):
            layer, module = entry // len(MODULES), MODULES[entry % len(MODULES)]
            projection, columns = source.projection(layer, module), source.extras.columns.get((layer, module))
            offsets[entry, 2] = 0 if projection is None else projection.a.shape[0]
            found = {} if projection is None else {0: projection.a, 1: projection.b}
            if columns is not None:
                # Float32 among shorter numbers: only their bits are copied.
                found[3] = torch.cat((columns.gain, columns.shift)).view(dtype)
            for number, part in found.items():
                offsets[entry, number] = end
                end += -(-part.numel() // step) * step
                parts.append(part)
        flat = torch.zeros(end, dtype=dtype)
        at = 0
        for part in parts:
            flat[at : at + part.numel()] = part.flatten()
            at += -(-part.numel() // step) * step
        return cls(flat, offsets)

    def to(self, device: torch.device) -> TabledAdapter:
        """Copy to a device on the current stream."""
        flat = self.flat.to(device, non_blocking=True)
        return TabledAdapter(flat, self._offsets, _addressed(flat, self._offsets).to(device, non_blocking=True))

    def pinned(self) -> TabledAdapter:
        """Copy to page-locked host memory."""
        return TabledAdapter(self.flat.pin_memory(), self._offsets)

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Keep the table as long as the matrices."""
        super().keep_for(stream)
        self.table.record_stream(stream)


def _addressed(flat: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    table = torch.where(offsets == NOWHERE, 0, offsets * flat.element_size() + flat.data_ptr())
    table[:, 2] = offsets[:, 2]
    return table


class TritonLora:
    """`LoraProducts` of whatever adapters `fill` was told of; what it launches can be recorded and replayed.

    Attributes:
        max_segments: programs are started for so many segments; 0 where the step has no adapter.
    """

    def __init__(self, runtime: GpuRuntime, max_segments: int, max_rank: int) -> None:
        self._max_rank = max_rank
        self._staging = Staging(3 * max_segments + 1, runtime)
        self._count, self._segments = self._staging.device[:1], self._staging.device[1:].view(-1, 3)
        self.max_segments = 0

    def fill(self, segments: Sequence[AdapterSegment]) -> None:
        """Enqueue the copy of a step's segments; their adapters stay where they are until it has run.

        Raises:
            EngineError: an adapter was not laid out for the kernels.
        """
        self.max_segments = len(segments)
        if not segments:
            return
        numbers = [len(segments)]
        for segment in segments:
            if not isinstance(segment.weights, TabledAdapter):
                raise EngineError("an adapter reached the kernels without having been laid out for them")
            numbers += [segment.start, segment.end, segment.weights.table.data_ptr()]
        self._staging.send_list(numbers)

    def expect(self, max_segments: int) -> None:
        """Have no segments now, and programs for so many in the recording that is about to be made."""
        self._staging.send_list([0])
        self.max_segments = max_segments

    def embed(self, token_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Do nothing, as all of the whole model below: an adapter that asks for it is refused when it is laid out."""

    def norm(self, layer: int, module: str, h: torch.Tensor) -> None:
        """Do nothing."""

    def head(self, h: torch.Tensor, logits: torch.Tensor) -> None:
        """Do nothing."""

    def apply(self, layer: int, module: str, x: torch.Tensor, y: torch.Tensor) -> None:
        """Multiply by one module."""
        self.apply_fused(layer, (module,), x, y, (y.shape[1],))

    def apply_fused(
        self, layer: int, modules: Sequence[str], x: torch.Tensor, y: torch.Tensor, splits: Sequence[int]
    ) -> None:
        """Multiply by neighbouring modules: one shrink, one expand."""
        entry = layer * len(MODULES) + MODULES.index(modules[0])
        shrunk = lora_shrink(
            x,
            self._segments,
            self._count,
            entry=entry,
            num_modules=len(modules),
            max_rank=self._max_rank,
            max_segments=self.max_segments,
        )
        lora_expand(y, shrunk, self._segments, self._count, entry=entry, splits=splits, max_segments=self.max_segments)
