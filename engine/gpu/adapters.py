"""The adapters' products on a GPU: one shrink and one expand for all adapters of a step.

    tiles of a step    (first token, end, address of an adapter's table) each: segments cut to the size of a program

A step writes three numbers for each tile. Nothing is gathered or padded to a common rank: rows as short as a rank are
padded to whole loads only. Changes that only some adapters make (embedding, norms, output matrix) cost nothing in a
batch without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from enum import IntEnum

import torch

from adapters.tensor_names import WHOLE_MODEL
from engine.adapter_tables import ENTRIES, HEAD_NORMS, entry_of, num_entries, product_entry
from engine.errors import EngineError
from engine.gpu.runtime import CudaRuntime
from engine.gpu.staging import Staging
from engine.gpu.tabled_adapter import EXPERTS_ENTRY, TabledAdapter
from engine.lora import AdapterSegment, HeadNorms, LinearProducts, cut_segments
from engine.placing import placed
from kernels.experts.reference import Part
from kernels.experts.routing import Routing
from kernels.lora_expand.launch import lora_expand
from kernels.lora_experts.launch import expert_expand, expert_shrink, fill_row_tables
from kernels.lora_gather.launch import lora_gather
from kernels.lora_logits.launch import lora_logits
from kernels.lora_shrink.launch import TILE, Tiles, cut, lora_shrink


class AdapterScope(IntEnum):
    """How much of the model the adapters of a step change; each level includes those before it."""

    NOTHING = 0
    LINEAR_MODULES = 1
    WHOLE_MODEL = 2


class TritonLora:
    """`LoraProducts` of the adapters given to `fill`; its launches can be captured and replayed.

        numbers of a step    [ counts of tiles of tokens, of samples | tiles of tokens | of samples ]

    Args:
        max_segments, max_tokens: of a step.
        max_rank: of any adapter.
        is_mixture: whether the model has experts, which adapters may change.
        entries: as in `engine.adapter_tables.entry_of`.

    Attributes:
        scope: of the step's adapters.
        has_experts: whether any of them changes experts.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        max_segments: int,
        max_rank: int,
        max_tokens: int,
        *,
        is_mixture: bool = False,
        entries: Sequence[str] = ENTRIES,
    ) -> None:
        self._runtime = runtime
        self._entries = entries
        self._segments: Sequence[AdapterSegment] = ()
        self.device = runtime.device
        self._max_rank = max_rank
        max_tiles = max_segments + max_tokens // TILE
        # Keeps every tensor aligned to the widest load: kernels are compiled for tensors that are.
        room = 3 * (max_tiles + max_tiles % 2)
        self._staging = Staging(4 + 2 * room, runtime)
        self._samples_at = 4 + room
        self._tokens, self._samples = (
            Tiles(numbers=self._staging.device[at : at + room].view(-1, 3), count=count, most=0)
            for at, count in ((4, self._staging.device[:1]), (self._samples_at, self._staging.device[2:3]))
        )
        self.scope = AdapterScope.NOTHING
        self.is_mixture = is_mixture
        self.has_experts = False
        self._row_tables = torch.zeros(max_tokens if is_mixture else 0, dtype=torch.int64, device=self.device)

    def fill(self, segments: Sequence[AdapterSegment], samples: Sequence[AdapterSegment] = ()) -> None:
        """Enqueue the copy of a step's segments; their adapters must stay in place until it has run.

        `samples` are required if an adapter changes the whole model.

        Raises:
            EngineError: an adapter was not laid out for the kernels.
        """
        self._segments = segments
        self.scope = AdapterScope.LINEAR_MODULES if segments else AdapterScope.NOTHING
        if any(segment.weights.changes_whole_model for segment in segments):
            self.scope = AdapterScope.WHOLE_MODEL
        self.has_experts = any(segment.weights.has_experts for segment in segments)
        of_tokens, of_samples = _numbers(segments), _numbers(samples)
        self._size(len(of_tokens) // 3, len(of_samples) // 3)
        if not segments:
            return
        numbers = [self._tokens.most, 0, self._samples.most, 0, *of_tokens]
        if samples:
            numbers += [0] * (self._samples_at - len(numbers)) + of_samples
        self._staging.send_list(numbers)

    def expect(
        self, max_tiles: int, scope: AdapterScope = AdapterScope.WHOLE_MODEL, *, has_experts: bool = True
    ) -> None:
        """Clear the tiles, and size the grids of the next launches for `max_tiles`, as a recording needs.

        `has_experts` is ignored for a model without experts.
        """
        self._staging.send_list([0, 0, 0, 0])
        self._size(max_tiles, max_tiles)
        self.scope = scope if max_tiles else AdapterScope.NOTHING
        self.has_experts = has_experts and self.is_mixture and self.scope > AdapterScope.NOTHING

    def begin(self, num_tokens: int) -> None:
        """Find the adapter of each of a step's tokens, before any product of experts."""
        if self.has_experts:
            fill_row_tables(self._row_tables[:num_tokens], self._tokens, entry=EXPERTS_ENTRY)

    def embed(self, token_ids: torch.Tensor, x: torch.Tensor) -> None:
        """Begin, and gather rows of the adapters' own embeddings and low-rank products."""
        self.begin(len(token_ids))
        if self.scope == AdapterScope.WHOLE_MODEL:
            own, entry = entry_of(WHOLE_MODEL, "own embed_tokens"), entry_of(WHOLE_MODEL, "embed_tokens")
            lora_gather(token_ids, x, self._tokens, own=own, entry=entry)

    def norm(self, layer: int, module: str, h: torch.Tensor) -> None:
        """Scale the norm's columns: an expand without a product."""
        tiles = self._samples if layer == WHOLE_MODEL else self._tokens
        if self.scope == AdapterScope.WHOLE_MODEL and tiles.most:
            nothing = torch.empty(1, len(h), 1, self._max_rank, dtype=torch.float32, device=h.device)
            lora_expand(h, nothing, tiles, entry=entry_of(layer, module, self._entries), splits=(h.shape[1],))

    def head_norms(self, layer: int, norms: HeadNorms, num_tokens: int) -> HeadNorms:
        """Repeat the norms for each token, side by side, and scale them: an expand of two modules without products."""
        tiles = self._tokens
        if self.scope < AdapterScope.WHOLE_MODEL or not tiles.most:
            return norms
        both = torch.cat((norms.q, norms.k)).repeat(num_tokens, 1)
        nothing = torch.empty(1, num_tokens, 2, self._max_rank, dtype=torch.float32, device=both.device)
        widths = len(norms.q), len(norms.k)
        lora_expand(both, nothing, tiles, entry=entry_of(layer, HEAD_NORMS[0], self._entries), splits=widths)
        return HeadNorms(*both.split(widths, dim=1))

    def head(self, h: torch.Tensor, logits: torch.Tensor) -> None:
        """Multiply by the adapters' own matrices, then by their products."""
        tiles = self._samples
        if self.scope == AdapterScope.WHOLE_MODEL and tiles.most:
            own, entry = entry_of(WHOLE_MODEL, "own lm_head"), entry_of(WHOLE_MODEL, "lm_head")
            lora_logits(h, logits, tiles, entry=own)
            shrunk = lora_shrink(h, tiles, entry=entry, num_modules=1, max_rank=self._max_rank)
            lora_expand(logits, shrunk, tiles, entry=entry, splits=(logits.shape[1],), dtype=h.dtype)

    def multiply(
        self,
        product: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        layer: int,
        modules: Sequence[str],
        splits: Sequence[int],
    ) -> torch.Tensor:
        """Shrink concurrently with the base's product, which is independent of it; expand into the product's result."""
        tiles, entry = self._tokens, entry_of(layer, modules[0], self._entries)
        with self._runtime.beside() as join:
            shrunk = lora_shrink(x, tiles, entry=entry, num_modules=len(modules), max_rank=self._max_rank)
        y = product(x)
        join()
        lora_expand(y, shrunk, tiles, entry=entry, splits=splits)
        return y

    def of_tokens(self, start: int, end: int) -> LinearProducts | None:
        """Cut the segments on the host and send their tiles anew; only in steps that are not recorded."""
        if not self._segments:
            # Launches are being compiled or measured, with no tiles.
            return self
        numbers = _numbers(cut_segments(self._segments, start, end))
        if not numbers:
            return None
        sent = placed([len(numbers) // 3, 0, *numbers], self.device)
        part = copy(self)
        part._tokens = Tiles(numbers=sent[2:].view(-1, 3), count=sent[:1], most=len(numbers) // 3)
        return part

    def change_experts(
        self,
        layer: int,
        num_experts: int,
        part: Part,
        routing: Routing,
        height: int,
        x: torch.Tensor,
        y: torch.Tensor,
    ) -> None:
        """Add the adapters' part to a product of a layer's experts; a `kernels.experts.launch.Change` once bound."""
        tables = self._row_tables[: len(routing.experts)]
        entry, products = product_entry(layer, part, num_experts), num_entries(part)
        shrunk = expert_shrink(
            x, routing, tables, entry=entry, products=products, max_rank=self._max_rank, height=height
        )
        expert_expand(y, shrunk, routing, tables, entry=entry, height=height)

    def _size(self, of_tokens: int, of_samples: int) -> None:
        """Set how many tiles the grids of the next launches are for."""
        self._tokens, self._samples = replace(self._tokens, most=of_tokens), replace(self._samples, most=of_samples)


def _numbers(segments: Sequence[AdapterSegment]) -> list[int]:
    numbers: list[int] = []
    for segment in segments:
        if not isinstance(segment.weights, TabledAdapter):
            raise EngineError("an adapter reached the kernels without having been laid out for them")
        address = segment.weights.table.data_ptr()
        for start, end in cut(segment.start, segment.end):
            numbers += [start, end, address]
    return numbers
