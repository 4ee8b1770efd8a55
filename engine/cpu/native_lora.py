"""Adapters as the CPU kernels read them, and their part of a step as ops of a recorded one.

    table of an adapter    [ whole model | layer 0: q k v o gate up down norms | layer 1: ... ]    `ENTRIES` each, of
                           (address of A, address of B, rank, address of gain, address of shift)
    segments of a step     (first token, end, address of a table) each

Nothing is gathered and nothing padded to a common rank: a step writes three numbers for each segment. What only some
adapters need is counted apart, so that it costs nothing where none of them is in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from adapters.peft_format import WHOLE_MODEL
from adapters.weights import AdapterWeights, Extras, RawAdapter
from engine.errors import EngineError
from engine.lora import ENTRIES, AdapterSegment, entry_of, refuse_magnitudes
from kernels.lora_pack.launch import Packing, lora_pack
from kernels.lora_pack.reference import Form
from kernels.native import NativeKernels
from kernels.packed_linear.reference import to_panels
from kernels.program import Program

ENTRY_NUMBERS = 5


class PanelAdapter(AdapterWeights):
    """An adapter whose B's are in panels, and its table.

    Args:
        source: as it was read.
        quantization: what the base's linear layers were rounded to, None where they are as the checkpoint has them.

    Attributes:
        table: [(1 + layers) * 9, 5] int64; valid as long as this object lives.
        address: of the table.

    Raises:
        LayoutError: it measures columns of the base's weights, which the quantized base does not have.
    """

    def __init__(
        self, source: RawAdapter, num_layers: int, kernels: NativeKernels, *, quantization: str | None = None
    ) -> None:
        if quantization is not None:
            refuse_magnitudes(source.extras, quantization)
        packings: list[Packing] = []
        # In the order in which a step reads them.
        keys = sorted(source.projections, key=lambda key: entry_of(*key))
        for key in keys:
            item = source.projections[key]
            form = Form.TRANSPOSED if key[1] == "embed_tokens" else Form.AS_IS
            packings.append(Packing(matrix=item.a, form=form))
            packings.append(Packing(matrix=item.b, form=Form.PANELS, factor=item.scaling, gain=item.gain))
        packed = lora_pack(packings, source.dtype, kernels)
        self.table = torch.zeros((num_layers + 1) * len(ENTRIES), ENTRY_NUMBERS, dtype=torch.int64)
        self.address = self.table.data_ptr()
        entries = torch.tensor([entry_of(*key) for key in keys], dtype=torch.int64)
        ranks = [source.projections[key].a.shape[0] for key in keys]
        rows = list(zip(packed.addresses[::2], packed.addresses[1::2], ranks, strict=True))
        self.table[entries, :3] = torch.tensor(rows, dtype=torch.int64).view(-1, 3)
        super().__init__(packed.flat, (), _laid_out(source.extras))
        self.changes_whole_model = source.changes_whole_model
        for (layer, module), columns in self.extras.columns.items():
            entry = entry_of(layer, module)
            self.table[entry, 3:] = torch.tensor([columns.gain.data_ptr(), columns.shift.data_ptr()])
        self._enter_matrices()

    def _enter_matrices(self) -> None:
        """Enter what the adapter has in place of the base's matrices."""
        embedding, head = (self.extras.matrices.get(name) for name in ("embed_tokens", "lm_head"))
        if embedding is not None:
            self.table[entry_of(WHOLE_MODEL, "own embed_tokens"), 0] = embedding.data_ptr()
            self.table[entry_of(WHOLE_MODEL, "own embed_tokens"), 2] = embedding.shape[1]
        if head is not None:
            # A product of full rank, before which the base's logits are multiplied by 0.
            panels, _, lanes, step = head.shape
            self._nothing = torch.zeros(panels * lanes)
            addresses = [head.data_ptr(), head.shape[1] * step, *[self._nothing.data_ptr()] * 2]
            self.table[entry_of(WHOLE_MODEL, "own lm_head"), 1:] = torch.tensor(addresses)


def _laid_out(extras: Extras) -> Extras:
    own = dict(extras.matrices)
    if "lm_head" in own:
        own["lm_head"] = to_panels(own["lm_head"])
    return Extras(columns=extras.columns, matrices=own)


class NativeLora:
    """`LoraProducts` that record themselves; `fill` says which adapters a step has.

    Args:
        counts: int64 [3], where the numbers of segments are written for the kernels: of tokens; the same, or 0 where
            no adapter changes the whole model; of samples.
    """

    def __init__(self, program: Program, dtype: torch.dtype, max_rank: int, counts: torch.Tensor) -> None:
        self._program = program
        self._dtype = dtype
        # An odd rank is shrunk into one number more.
        self._max_rank = max_rank + max_rank % 2
        self._numbers = counts.numpy()
        self._count, self._whole_count, self._sample_count = (counts[i : i + 1] for i in range(3))

    def begin(self, max_segments: int, max_tokens: int) -> None:
        """Make room for the largest step."""
        self._segments = torch.zeros(max_segments, 3, dtype=torch.int64)
        self._sample_segments = torch.zeros(max_segments, 3, dtype=torch.int64)
        self._shrunk = torch.empty(max_tokens * 3 * self._max_rank, dtype=self._dtype)

    def fill(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> None:
        """Write a step's segments; their adapters stay where they are until it has run.

        Raises:
            EngineError: an adapter was not laid out for the kernels.
        """
        changes_whole_model = any(segment.weights.changes_whole_model for segment in segments)
        self._numbers[:] = len(segments), len(segments) if changes_whole_model else 0, len(samples)
        _write(segments, self._segments)
        _write(samples, self._sample_segments)

    def multiply(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        layer: int,
        modules: Sequence[str],
        splits: Sequence[int],
    ) -> torch.Tensor:
        """Record the base's product, one shrink and one expand."""
        y = product(x)
        sizes = (entry_of(layer, modules[0]), len(modules), self._max_rank, *splits)
        self._shrink(self._count, x, self._segments, sizes)
        self._add("lora_expand", self._count, (self._shrunk, self._segments, y), (y.shape[1], *sizes))
        return y

    def embed(self, token_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Record what adapters change in the embedding."""
        width, own, entry = x.shape[1], entry_of(WHOLE_MODEL, "own embed_tokens"), entry_of(WHOLE_MODEL, "embed_tokens")
        self._add("lora_gather", self._whole_count, (token_ids, self._segments, x), (own, width))
        self._add("lora_gather", self._whole_count, (token_ids, self._segments, self._shrunk), (entry, self._max_rank))
        sizes = (width, entry, 1, self._max_rank, width)
        self._add("lora_expand", self._whole_count, (self._shrunk, self._segments, x), sizes)

    def norm(self, layer: int, module: str, h: torch.Tensor) -> None:
        """Record the change of columns."""
        count, segments = self._whole_count, self._segments
        if layer == WHOLE_MODEL:
            count, segments = self._sample_count, self._sample_segments
        width, entry = h.shape[1], entry_of(layer, module)
        self._add("lora_expand", count, (self._shrunk, segments, h), (width, entry, 1, self._max_rank, width))

    def head(self, h: torch.Tensor, logits: torch.Tensor) -> None:
        """Record what adapters change in the output matrix."""
        (depth, width), segments = (h.shape[1], logits.shape[1]), self._sample_segments
        own, entry = entry_of(WHOLE_MODEL, "own lm_head"), entry_of(WHOLE_MODEL, "lm_head")
        self._add("lora_logits", self._sample_count, (h, segments, logits), (width, own, 1, depth, width))
        sizes = (entry, 1, self._max_rank, width)
        self._shrink(self._sample_count, h, segments, sizes)
        self._add("lora_logits", self._sample_count, (self._shrunk, segments, logits), (width, *sizes))

    def _shrink(self, count: torch.Tensor, x: torch.Tensor, segments: torch.Tensor, sizes: Sequence[int]) -> None:
        # Beside the base's own product of x, which has nothing to do with it.
        tensors = (x, segments, self._shrunk)
        self._program.add("lora_shrink", self._dtype, count, tensors, (x.shape[1], *sizes), begins_beside=True)

    def _add(self, name: str, count: torch.Tensor, tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> None:
        self._program.add(name, self._dtype, count, tensors, sizes)


def _write(segments: Sequence[AdapterSegment], out: torch.Tensor) -> None:
    rows = []
    for segment in segments:
        if not isinstance(segment.weights, PanelAdapter):
            raise EngineError("an adapter reached the kernels without having been laid out for them")
        rows.append((segment.start, segment.end, segment.weights.address))
    if rows:
        # All at once: a step of many adapters has as many segments as requests.
        out[: len(rows)] = torch.tensor(rows)
