"""An adapter in the format of the GPU kernels: its matrices in one buffer or in pages, and a table of their addresses.

    table of an adapter    [ whole model | layer 0: q k v o gate up down norms others | layer 1: ... ]    each of
                           `ENTRY_NUMBERS`:
                           address of A, address of B, rank, address of gains and shifts of columns, 0 for none
    behind it, of experts  [ layer 0: expert 0: gate and up together or gate, up, down | ... ]    as many each:
                           address of A, address of B, rank, outputs

Kernels use addresses, so pages may lie anywhere; no matrix spans two pages.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from adapters.experts import expert_module
from adapters.tensor_names import WHOLE_MODEL
from adapters.weights import AdapterWeights, Columns, Extras
from engine.adapter_tables import ENTRIES, ENTRIES_OF_EXPERT, EXPERT_ENTRIES, WHOLE_ENTRIES, entry_of, expert_entry
from kernels.lora_shrink.launch import whole_rows

ALIGNED_BYTES = 16
"""Alignment of a matrix: the size of the widest load."""
ENTRY_NUMBERS = 4
A, B, RANK, COLUMNS = range(ENTRY_NUMBERS)
OUTPUTS = COLUMNS
"""In entries of experts, which have no gains and shifts of columns."""
EXPERTS_ENTRY = len(WHOLE_ENTRIES)
"""A whole-model entry whose first number is how many entries precede those of experts, 0 without experts."""
MAX_OPEN_PAGES = 64
"""How many of the newest pages may still receive a part: an adapter of experts has thousands of pages and parts."""
NUM_PIECES = 16
"""Of page-locked memory for an adapter, at most: torch rounds each up to a power of two."""
NOWHERE = -1
"""Offset of a matrix that the adapter does not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layout:
    """Where an adapter's matrices lie in its buffer.

    Attributes:
        num_bytes: of the buffer.
        page_bytes: page size, so that no matrix crosses a page's end; 0 if one is longer than a page.
        offsets: [entries, 4] int64: offsets in elements, `NOWHERE` for none, and ranks; for experts also outputs.
        first_expert: number of entries before those of experts, possibly all.
        norm_width: of the final norm, 0 if the adapter does not change it.
        changes_whole_model, is_finite: as in `AdapterWeights`.
        head: as in `Extras`; not in the buffer.
    """

    num_bytes: int
    page_bytes: int
    offsets: torch.Tensor
    first_expert: int
    norm_width: int
    changes_whole_model: bool
    is_finite: bool
    head: torch.Tensor | None

    @property
    def head_bytes(self) -> int:
        """Memory in bytes that the head takes on the host."""
        return 0 if self.head is None else self.head.nbytes

    @property
    def num_pages(self) -> int:
        """How many pages the buffer takes, 0 if it cannot be stored in pages."""
        return -(-self.num_bytes // self.page_bytes) if self.page_bytes else 0

    def extras(self, pages: Sequence[torch.Tensor]) -> Extras:
        """Return views of the final norm's columns, which torch operators apply to hidden states that are returned.

        And the head, which is applied on the host.
        """
        if not self.norm_width:
            return Extras(head=self.head)
        page, start = divmod(int(self.offsets[entry_of(WHOLE_MODEL, "norm"), COLUMNS]), pages[0].numel())
        count = 2 * self.norm_width * torch.float32.itemsize // pages[0].itemsize
        gain, shift = pages[page][start : start + count].view(torch.float32).split(self.norm_width)
        return Extras(columns={(WHOLE_MODEL, "norm"): Columns(gain=gain, shift=shift)}, head=self.head)

    def table(self, pages: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the addresses and ranks, on the host."""
        first = torch.tensor([page.data_ptr() for page in pages])
        size = max(1, pages[0].numel())
        places = self.offsets.clone()
        places[self.first_expert :, OUTPUTS] = NOWHERE
        addresses = first[places // size] + places % size * pages[0].itemsize
        table = torch.where(places == NOWHERE, 0, addresses)
        table[:, RANK] = self.offsets[:, RANK]
        table[self.first_expert :, OUTPUTS] = self.offsets[self.first_expert :, OUTPUTS]
        if self.first_expert < len(table):
            table[EXPERTS_ENTRY, 0] = self.first_expert
        return table


class TabledAdapter(AdapterWeights):
    """An adapter in one buffer, `flat`, or in pages of equal size, with a table of addresses.

    Attributes:
        table: [entries, 4] int64; valid as long as this object lives and the pages belong to the adapter.
    """

    def __init__(self, pages: Sequence[torch.Tensor], layout: _Layout, device: torch.device | None = None) -> None:
        super().__init__({}, pages[0].dtype, layout.extras(pages))
        self.flat = pages[0]
        self.changes_whole_model = layout.changes_whole_model
        self.has_experts = layout.first_expert < len(layout.offsets)
        table = layout.table(pages)
        self.table = table if device is None else table.to(device, non_blocking=True)
        self._layout = layout
        self._pages = pages

    @classmethod
    def of(
        cls,
        source: AdapterWeights,
        num_layers: int,
        page_bytes: int = 0,
        num_experts: int = 0,
        entries: Sequence[str] = ENTRIES,
    ) -> TabledAdapter:
        """Lay out an adapter that is in host memory.

        Args:
            page_bytes: size of the pages that it may be copied to, a multiple of `ALIGNED_BYTES`; 0 for none.
            num_experts: experts of a layer.
            entries: as in `entry_of`.
        """
        dtype = source.dtype
        first_expert = (num_layers + 1) * len(entries)
        parts = [*_parts(source, num_layers, entries)]
        num_behind = 0
        if source.has_experts:
            parts += _expert_parts(source, num_layers, num_experts, first_expert)
            num_behind = num_layers * num_experts * ENTRIES_OF_EXPERT
        # Float32 parts are viewed as the shorter dtype: only their bits are copied.
        numbers = [part.numbers.reshape(-1).view(dtype) for part in parts]
        sizes = [part.numel() for part in numbers]
        page = page_bytes // dtype.itemsize if max(sizes, default=0) * dtype.itemsize <= page_bytes else 0
        starts, end = _starts(sizes, ALIGNED_BYTES // dtype.itemsize, page)
        flat = torch.zeros(end, dtype=dtype)
        offsets = torch.full((first_expert + num_behind, ENTRY_NUMBERS), NOWHERE, dtype=torch.int64)
        offsets[:, RANK], offsets[first_expert:, OUTPUTS] = 0, 0
        # The same memory: numpy writes single numbers faster.
        written = offsets.numpy()
        for part, start, size, held in zip(parts, starts, sizes, numbers, strict=True):
            written[part.entry, part.address] = start
            written[part.entry, RANK] = max(part.rank, written[part.entry, RANK])
            if part.entry >= first_expert and part.address == B:
                written[part.entry, OUTPUTS] = len(part.numbers)
            flat[start : start + size] = held
        norm = source.extras.columns.get((WHOLE_MODEL, "norm"))
        width = 0 if norm is None else norm.gain.numel()
        layout = _Layout(
            num_bytes=flat.nbytes,
            page_bytes=page * dtype.itemsize,
            offsets=offsets,
            first_expert=first_expert,
            norm_width=width,
            changes_whole_model=source.changes_whole_model,
            is_finite=source.is_finite(),
            head=source.extras.head,
        )
        return cls([flat], layout)

    @property
    def num_bytes(self) -> int:
        """Device memory in bytes, without the head; other `extras` are views of it."""
        return self._layout.num_bytes

    @property
    def host_bytes(self) -> int:
        """As in the base class, with the head."""
        return self._layout.num_bytes + self._layout.head_bytes

    @property
    def num_pages(self) -> int:
        """As in `_Layout`."""
        return self._layout.num_pages

    def is_finite(self) -> bool:
        """Whether it holds neither NaN nor infinity; not computed from `flat`, which is not all of one dtype."""
        return self._layout.is_finite

    def to(self, device: torch.device, pages: Sequence[torch.Tensor] = ()) -> TabledAdapter:
        """Copy to a device, or into `num_pages` pages there, on the current stream."""
        return _copied([self.flat], self._layout, device, pages)

    def pinned(self) -> PinnedAdapter:
        """Copy to page-locked host memory."""
        return PinnedAdapter(self.flat, self._layout)

    def keep_for(self, stream: torch.cuda.Stream) -> None:
        """Delay reuse of the first page and the table until the work queued on `stream` when they are freed is done."""
        self.flat.record_stream(stream)
        self.table.record_stream(stream)


class PinnedAdapter(AdapterWeights):
    """An adapter in page-locked host memory, from which a transfer to a GPU is asynchronous.

    In pieces of one power of two, and the rest: torch rounds up to such, and keeps what is freed for others of the same
    size.
    """

    def __init__(self, flat: torch.Tensor, layout: _Layout) -> None:
        super().__init__({}, flat.dtype)
        self._layout = layout
        piece_bytes = _power_of_two(-(-flat.nbytes // NUM_PIECES))
        self._pieces = [piece.pin_memory() for piece in flat.split(max(1, piece_bytes // flat.itemsize))]

    @property
    def num_bytes(self) -> int:
        """As in `TabledAdapter`."""
        return self._layout.num_bytes

    @property
    def host_bytes(self) -> int:
        """As in `TabledAdapter`, by what torch page-locks."""
        return sum(_power_of_two(piece.nbytes) for piece in self._pieces) + self._layout.head_bytes

    @property
    def num_pages(self) -> int:
        """As in `TabledAdapter`."""
        return self._layout.num_pages

    def to(self, device: torch.device, pages: Sequence[torch.Tensor] = ()) -> TabledAdapter:
        """As in `TabledAdapter`."""
        return _copied(self._pieces, self._layout, device, pages)


def _copied(
    parts: Sequence[torch.Tensor], layout: _Layout, device: torch.device, pages: Sequence[torch.Tensor]
) -> TabledAdapter:
    """Copy the consecutive parts of a buffer to a device, into pages if there are any."""
    size, dtype = sum(len(part) for part in parts), parts[0].dtype
    typed = [page.view(dtype) for page in pages] or [torch.empty(size, dtype=dtype, device=device)]
    rooms = iter(typed)
    room = next(rooms)
    for part in parts:
        while len(part):
            room = room if len(room) else next(rooms)
            count = min(len(part), len(room))
            room[:count].copy_(part[:count], non_blocking=True)
            part, room = part[count:], room[count:]
    return TabledAdapter(typed, layout, device)


def _power_of_two(count: int) -> int:
    """Return the smallest power of two that is not less."""
    return 1 << max(0, count - 1).bit_length()


def _starts(sizes: Sequence[int], step: int, page: int) -> tuple[list[int], int]:
    """Return where parts begin, at multiples of `step` and none across two pages, and the end of the last page.

    Each goes to the first open page with room: small parts fill the gaps that large ones leave.
    """
    starts: list[int] = []
    ends: list[int] = []
    room = page or sys.maxsize
    for size in sizes:
        opened = range(max(0, len(ends) - MAX_OPEN_PAGES), len(ends))
        index = next((index for index in opened if ends[index] + size <= room), len(ends))
        if index == len(ends):
            ends.append(0)
        starts.append(index * room + ends[index])
        ends[index] += -(-size // step) * step
    return starts, (len(ends) - 1) * room + ends[-1] if ends else 0


class _Part(NamedTuple):
    """A part of an adapter: its entry in the table, the address's column in the entry, and the entry's rank."""

    entry: int
    address: int
    rank: int
    numbers: torch.Tensor


def _parts(source: AdapterWeights, num_layers: int, entries: Sequence[str]) -> Iterator[_Part]:
    for layer in range(WHOLE_MODEL, num_layers):
        for module in WHOLE_ENTRIES if layer == WHOLE_MODEL else entries:
            entry = entry_of(layer, module, entries)
            projection, columns = source.projection(layer, module), source.extras.columns.get((layer, module))
            if projection is not None:
                rank = projection.a.shape[0]
                # Transposed: rows of the embedding's A are gathered by token.
                a = whole_rows(projection.a.T) if module == "embed_tokens" else projection.a
                yield _Part(entry, A, rank, a)
                yield _Part(entry, B, rank, whole_rows(projection.b))
            if columns is not None:
                yield _Part(entry, COLUMNS, 0, torch.cat((columns.gain, columns.shift)))
    for name, address in (("embed_tokens", A), ("lm_head", B)):
        own = source.extras.matrices.get(name)
        if own is not None:
            yield _Part(entry_of(WHOLE_MODEL, f"own {name}"), address, own.shape[1], own)


def _expert_parts(source: AdapterWeights, num_layers: int, num_experts: int, first: int) -> Iterator[_Part]:
    for layer in range(num_layers):
        for expert in range(num_experts):
            for projection in EXPERT_ENTRIES:
                module = expert_module(expert, projection)
                found = source.projection(layer, module)
                if found is not None:
                    entry, rank = first + expert_entry(layer, module, num_experts), found.a.shape[0]
                    yield _Part(entry, A, rank, found.a)
                    yield _Part(entry, B, rank, whole_rows(found.b))
