"""Adapters in the format of the CPU kernels, and their products as ops of a recorded step.

    table of an adapter    [ whole model | layer 0: q k v o gate up down norms | layer 1: ... ]    `ENTRIES` each, of
                           (address of A, address of B, rank, address of gain, address of shift)
    segments of a step     (first token, end, address of a table) each
    table of its experts   [ layer 0: expert 0: gate and up together or gate, up, down | expert 1: ... | layer 1: ... ]
                           of (address of A, address of B, rank, outputs); only if the adapter changes experts

Nothing is gathered or padded to a common rank: a step writes three numbers for each segment. Segments that change the
whole model, or experts, are counted separately, so a batch without them pays nothing for them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from adapters.experts import is_of_experts
from adapters.tensor_names import WHOLE_MODEL
from adapters.weights import AdapterWeights, Extras, RawAdapter
from engine.adapter_tables import (
    ENTRIES,
    ENTRIES_OF_EXPERT,
    HEAD_NORMS,
    entry_of,
    expert_entry,
    num_entries,
    product_entry,
)
from engine.errors import EngineError
from engine.lora import AdapterSegment, HeadNorms
from kernels.experts.reference import Part
from kernels.lora_pack.packing import Packing, lora_pack
from kernels.lora_pack.reference import Form
from kernels.native import NativeKernels
from kernels.packed_linear.reference import to_panels
from kernels.program import Program

ENTRY_NUMBERS, EXPERT_NUMBERS = 5, 4


class PanelAdapter(AdapterWeights):
    """An adapter with its B matrices in panels, and its tables.

    Args:
        source: the adapter as read from its files.
        num_experts: experts of a layer.
        entries: as in `engine.adapter_tables.entry_of`.

    Attributes:
        table: [(1 + layers) * entries, 5] int64; valid as long as this object lives.
        address: of the table.
        changed: the entries that are not empty.
        max_rank: of all its matrices.
        expert_address: of the table of experts, 0 if the adapter changes none.
    """

    def __init__(
        self,
        source: RawAdapter,
        num_layers: int,
        kernels: NativeKernels,
        *,
        num_experts: int = 0,
        entries: Sequence[str] = ENTRIES,
    ) -> None:
        packings: list[Packing] = []
        # Packed in the order in which a step reads them.
        of_experts = [key for key in source.projections if is_of_experts(key[1])]
        plain = source.projections.keys() - set(of_experts) if of_experts else source.projections
        keys = sorted(plain, key=lambda key: entry_of(key[0], key[1], entries)) + of_experts
        for key in keys:
            item = source.projections[key]
            form = Form.TRANSPOSED if key[1] == "embed_tokens" else Form.AS_IS
            packings.append(Packing(matrix=item.a, form=form))
            packings.append(Packing(matrix=item.b, form=Form.PANELS, factor=item.scaling, gain=item.gain))
        packed = lora_pack(packings, source.dtype, kernels)
        self.table = torch.zeros((num_layers + 1) * len(entries), ENTRY_NUMBERS, dtype=torch.int64)
        self.address = self.table.data_ptr()
        items = [source.projections[key] for key in keys]
        sizes = [(item.a.shape[0], item.b.shape[0]) for item in items]
        found = [(a, b, *size) for a, b, size in zip(packed.addresses[::2], packed.addresses[1::2], sizes, strict=True)]
        rows = torch.tensor(found, dtype=torch.int64).view(-1, EXPERT_NUMBERS)
        places = [entry_of(layer, module, entries) for layer, module in keys[: len(plain)]]
        self.table[torch.tensor(places, dtype=torch.int64), :3] = rows[: len(plain), :3]
        self.max_rank = max((rank for rank, _ in sizes), default=0)
        super().__init__({}, source.dtype, _laid_out(source.extras))
        self._flat = packed.flat
        self.changes_whole_model, self.has_experts = source.changes_whole_model, bool(of_experts)
        self.expert_address = 0
        if of_experts:
            entries_there = num_layers * num_experts * ENTRIES_OF_EXPERT
            self._expert_table = torch.zeros(entries_there, EXPERT_NUMBERS, dtype=torch.int64)
            self._expert_table[[expert_entry(*key, num_experts) for key in of_experts]] = rows[len(plain) :]
            self.expert_address = self._expert_table.data_ptr()
        for (layer, module), columns in self.extras.columns.items():
            places.append(entry_of(layer, module, entries))
            self.table[places[-1], 3:] = torch.tensor([columns.gain.data_ptr(), columns.shift.data_ptr()])
        self.changed = frozenset(places)
        self._enter_matrices()

    def _tensors(self) -> list[torch.Tensor]:
        return [self._flat, *self.extras.tensors()]

    def _enter_matrices(self) -> None:
        """Enter the adapter's replacements of the base's embedding and output matrix."""
        embedding, head = (self.extras.matrices.get(name) for name in ("embed_tokens", "lm_head"))
        if embedding is not None:
            self.table[entry_of(WHOLE_MODEL, "own embed_tokens"), 0] = embedding.data_ptr()
            self.table[entry_of(WHOLE_MODEL, "own embed_tokens"), 2] = embedding.shape[1]
        if head is not None:
            # A full-rank product, with a gain and a shift of 0 to discard the base's logits.
            panels, _, lanes, step = head.shape
            self._nothing = torch.zeros(panels * lanes)
            addresses = [head.data_ptr(), head.shape[1] * step, *[self._nothing.data_ptr()] * 2]
            self.table[entry_of(WHOLE_MODEL, "own lm_head"), 1:] = torch.tensor(addresses)


def _laid_out(extras: Extras) -> Extras:
    own = dict(extras.matrices)
    if "lm_head" in own:
        own["lm_head"] = to_panels(own["lm_head"])
    return replace(extras, matrices=own)


def padded_rank(rank: int) -> int:
    """Return the width of a shrunk row: the kernels pad that of an odd rank by one number."""
    return rank + rank % 2


class NativeLora:
    """`LoraProducts` that record themselves; `fill` sets the adapters of each step.

    Args:
        counts: int64 [4], segment counts that the kernels read: of tokens; the same, but 0 if no adapter changes the
            whole model; of samples; of tokens whose adapters change experts.
    """

    def __init__(self, program: Program, dtype: torch.dtype, max_rank: int, counts: torch.Tensor) -> None:
        self._program = program
        self._dtype = dtype
        self._max_rank = padded_rank(max_rank)
        self._numbers = counts.numpy()
        self._count, self._whole_count, self._sample_count, self._expert_count = (counts[i : i + 1] for i in range(4))

    def begin(self, max_segments: int, max_tokens: int) -> None:
        """Allocate buffers for the largest step."""
        self._expert_segments = torch.zeros(max_segments, 3, dtype=torch.int64)
        self._expert_shrunk = torch.empty(0, dtype=self._dtype)
        self._segments = torch.zeros(max_segments, 3, dtype=torch.int64)
        self._sample_segments = torch.zeros(max_segments, 3, dtype=torch.int64)
        self._shrunk = torch.empty(max_tokens * 3 * self._max_rank, dtype=self._dtype)

    def fill(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> None:
        """Write a step's segments; their adapters must stay in place until it has run.

        Raises:
            EngineError: an adapter was not laid out for the kernels.
        """
        changes_whole_model = any(segment.weights.changes_whole_model for segment in segments)
        having = [segment for segment in segments if segment.weights.has_experts]
        self._numbers[:] = len(segments), len(segments) if changes_whole_model else 0, len(samples), len(having)
        _write(segments, self._segments)
        _write(samples, self._sample_segments)
        _write(having, self._expert_segments, of_experts=True)

    def multiply(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        layer: int,
        modules: Sequence[str],
        splits: Sequence[int],
    ) -> torch.Tensor:
        """Record the base's product, one shrink and one expand for all modules."""
        y = product(x)
        sizes = (entry_of(layer, modules[0]), len(modules), self._max_rank, *splits)
        self._shrink(self._count, x, self._segments, sizes)
        self._add("lora_expand", self._count, (self._shrunk, self._segments, y), (y.shape[1], *sizes))
        return y

    def change_experts(
        self,
        x: torch.Tensor,
        y: torch.Tensor,
        rows: torch.Tensor,
        groups: torch.Tensor,
        num_pairs: torch.Tensor,
        *,
        layer: int,
        num_experts: int,
        part: Part,
    ) -> None:
        """Record the adapters' shrink and expand for a layer's experts, as `kernels.lora_experts.reference` defines.

        Args:
            x: [tokens, in], or [pairs, in] for the second product ("down").
            y: [pairs, out], the base's product, computed by the preceding op.
            rows, groups: of the pairs, as `kernels.experts.reference.sort_by_expert` returns them.
            num_pairs: int64 [1].
            part: which product it is.
        """
        needed = len(rows) * 2 * self._max_rank
        if self._expert_shrunk.numel() < needed:
            self._expert_shrunk = torch.empty(needed, dtype=self._dtype)
        shrunk, between = self._expert_shrunk, (rows, groups, self._expert_segments, num_pairs)
        sizes = (product_entry(layer, part, num_experts), num_entries(part), self._max_rank)
        self._program.add(
            "expert_shrink",
            self._dtype,
            self._expert_count,
            (x, *between, shrunk),
            (x.shape[1], *sizes, part == "down"),
            begins_beside=True,
        )
        self._add("expert_expand", self._expert_count, (shrunk, *between, y), (y.shape[1], *sizes))

    def embed(self, token_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Record the adapters' changes of the embedding."""
        width, own, entry = x.shape[1], entry_of(WHOLE_MODEL, "own embed_tokens"), entry_of(WHOLE_MODEL, "embed_tokens")
        self._add("lora_gather", self._whole_count, (token_ids, self._segments, x), (own, width))
        self._add("lora_gather", self._whole_count, (token_ids, self._segments, self._shrunk), (entry, self._max_rank))
        sizes = (width, entry, 1, self._max_rank, width)
        self._add("lora_expand", self._whole_count, (self._shrunk, self._segments, x), sizes)

    def norm(self, layer: int, module: str, h: torch.Tensor) -> None:
        """Record the scaling of the norm's columns."""
        count, segments = self._whole_count, self._segments
        if layer == WHOLE_MODEL:
            count, segments = self._sample_count, self._sample_segments
        sizes = (h.stride(0), entry_of(layer, module), 1, self._max_rank, h.shape[1])
        self._add("lora_expand", count, (self._shrunk, segments, h), sizes)

    def head_norms(self, layer: int, norms: HeadNorms, num_tokens: int) -> HeadNorms:
        """Add the table entry of the adapters' head norms, which the kernel that norms the heads reads."""
        return norms._replace(entry=entry_of(layer, HEAD_NORMS[0]))

    @property
    def whole(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The segments of tokens and their number, which is 0 if no adapter changes the whole model."""
        return self._segments, self._whole_count

    def head(self, h: torch.Tensor, logits: torch.Tensor) -> None:
        """Record the adapters' changes of the output matrix."""
        (depth, width), segments = (h.shape[1], logits.shape[1]), self._sample_segments
        own, entry = entry_of(WHOLE_MODEL, "own lm_head"), entry_of(WHOLE_MODEL, "lm_head")
        self._add("lora_logits", self._sample_count, (h, segments, logits), (width, own, 1, depth, width))
        sizes = (entry, 1, self._max_rank, width)
        self._shrink(self._sample_count, h, segments, sizes)
        self._add("lora_logits", self._sample_count, (self._shrunk, segments, logits), (width, *sizes))

    def _shrink(self, count: torch.Tensor, x: torch.Tensor, segments: torch.Tensor, sizes: Sequence[int]) -> None:
        # May run beside the base's product of x: the two are independent.
        tensors = (x, segments, self._shrunk)
        self._program.add("lora_shrink", self._dtype, count, tensors, (x.shape[1], *sizes), begins_beside=True)

    def _add(self, name: str, count: torch.Tensor, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        self._program.add(name, self._dtype, count, tensors, sizes)


def table_of(segments: Sequence[AdapterSegment], *, of_experts: bool = False) -> torch.Tensor:
    """Return the segments of a step as the kernels read them: int64 [segments, 3].

    Raises:
        EngineError: an adapter was not laid out for the kernels.
    """
    rows = []
    for segment in segments:
        if not isinstance(segment.weights, PanelAdapter):
            raise EngineError("an adapter reached the kernels without having been laid out for them")
        address = segment.weights.expert_address if of_experts else segment.weights.address
        rows.append((segment.start, segment.end, address))
    return torch.tensor(rows, dtype=torch.int64).view(-1, 3)


def _write(segments: Sequence[AdapterSegment], out: torch.Tensor, *, of_experts: bool = False) -> None:
    if segments:
        # One copy for all: a step with many adapters has as many segments as requests.
        out[: len(segments)] = table_of(segments, of_experts=of_experts)
