"""The paged KV cache: keys and values of all layers, in blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch

from engine.cache.layout import CacheLayout, Place
from engine.decoder.model_spec import KvShape, cache_width
from engine.errors import ConfigError
from kernels.arena import lazy_zeros, touch
from kernels.row_quantization.reference import LIMIT_BY_DTYPE

TOUCHED_AT_ONCE_BYTES = 4 << 20
"""Takes a few milliseconds, for which a request may have to wait."""


class LayerCache(NamedTuple):
    """The cache of one layer.

    Attributes:
        k, v: [num_blocks + 1, block_tokens, kv_heads, head_dim]; a token's heads are contiguous.
        spans: quantization ranges of keys and of values, float32 [num_blocks + 1, block_tokens, kv_heads]; None if the
            cache is not quantized.
        table: index of the request's block table that lists the layer's blocks.
    """

    k: torch.Tensor
    v: torch.Tensor
    spans: tuple[torch.Tensor, torch.Tensor] | None = None
    table: int = 0


class KvCache:
    """Keys and values of all layers: [places, 2, num_blocks + 1, block_tokens, width].

    A place is shared by one layer of each table of the cache's layout (`engine.cache.layout`), as no block is in two
    tables. With a single table, a place is a layer. The width is that of the layer whose heads are the widest together;
    another layer leaves the rest of it unused.

    The extra last block is the null block: never written, always zero, it pads block tables. The backend defines the
    layout inside a block. With a one-byte `dtype` (see `kernels.row_quantization.reference`) the cache also keeps the
    range ("span") of each key and value of a token: a token is quantized once, when it is written, independent of later
    tokens in its block.

    With `by_block` the layers of a block are contiguous, and a CPU takes memory only for blocks that are used:

        [num_blocks + 1, places, 2, block_tokens, width]

    In the other layout, the first tokens would take two huge pages per layer.
    """

    def __init__(
        self,
        *,
        layout: CacheLayout,
        num_blocks: int,
        block_tokens: int,
        kv_shapes: Sequence[KvShape],
        dtype: torch.dtype,
        device: torch.device,
        by_block: bool = False,
    ) -> None:
        self.layout = layout
        shape = (layout.num_places, 2, num_blocks + 1, block_tokens, cache_width(kv_shapes))
        self._bytes_by_block: torch.Tensor | None = None
        if by_block:
            try:
                numbers = lazy_zeros(prod(shape), dtype)
            except OSError as error:
                num_bytes = prod(shape) * dtype.itemsize
                raise ConfigError(f"kv_cache_bytes: the system refuses {num_bytes} bytes: {error.strerror}.") from error
            self.data = numbers.view(num_blocks + 1, *shape[:2], *shape[3:]).movedim(0, 2)
            self._bytes_by_block = numbers.view(num_blocks + 1, -1).view(torch.uint8)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._spans: torch.Tensor | None = None
        if dtype in LIMIT_BY_DTYPE:
            self._spans = torch.zeros(*shape[:-1], max(heads for heads, _ in kv_shapes), device=device)
        self._layers = [self._layer(place, kv) for place, kv in zip(layout.places, kv_shapes, strict=True)]
        self.null_block = num_blocks
        self.block_tokens = block_tokens
        self._num_touched = 0
        # `touch` reads and rewrites bytes that another thread might be writing.
        self._memory_lock = threading.Lock()

    def layer(self, index: int) -> LayerCache:
        """Return the cache of one layer."""
        return self._layers[index]

    def pages(self, blocks: range) -> list[torch.Tensor]:
        """Return the memory of adjacent blocks as bytes: one contiguous tensor per place for keys and for values."""
        held = self.data[:, :, blocks.start : blocks.stop].flatten(0, 1)
        return [stretch.view(-1).view(torch.uint8) for stretch in held]

    @property
    def block_bytes(self) -> int:
        """Bytes in a block, including all places and spans."""
        spans = 0 if self._spans is None else self._spans[:, :, 0].nbytes
        return self.data[:, :, 0].nbytes + spans

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return a copy of the content of blocks: bytes [len(blocks), block_bytes], on the cache's device."""
        content = torch.empty(len(blocks), self.block_bytes, dtype=torch.uint8, device=self.data.device)
        for row, block in zip(content, blocks, strict=True):
            for held, copied in self._pairs(block, row):
                copied.copy_(held)
        return content

    def write(self, blocks: Sequence[int], content: torch.Tensor) -> None:
        """Write content that `read` returned into as many blocks; any thread, if no other uses these blocks."""
        with self._memory_lock:
            for row, block in zip(content, blocks, strict=True):
                for held, copied in self._pairs(block, row):
                    held.copy_(copied)

    def _layer(self, place: Place, kv: KvShape) -> LayerCache:
        k, v = (part[..., : kv.heads * kv.dim].unflatten(-1, kv) for part in self.data[place.number])
        spans = None
        if self._spans is not None:
            spans = self._spans[place.number, 0, ..., : kv.heads], self._spans[place.number, 1, ..., : kv.heads]
        return LayerCache(k, v, spans, place.table)

    def _pairs(self, block: int, content: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the parts of a block, [places, 2, block_tokens, ...], each with its view of `content` [block_bytes]."""
        start = 0
        for held in (self.data,) if self._spans is None else (self.data, self._spans):
            part = held[:, :, block]
            stop = start + part.nbytes
            yield part, content[start:stop].view(part.dtype).view(part.shape)
            start = stop

    def touch(self, end: int) -> bool:
        """Take memory from the system for some of the blocks below `end`; return False if none of them was left.

        The content of blocks stays. A page fault can take longer than computing the tokens stored in the page.
        """
        if self._bytes_by_block is None:
            return False
        at_once = max(1, TOUCHED_AT_ONCE_BYTES // self._bytes_by_block.shape[1])
        begin, stop = self._num_touched, min(end, self.null_block, self._num_touched + at_once)
        if begin >= stop:
            return False
        with self._memory_lock:
            touch(self._bytes_by_block[begin:stop])
        self._num_touched = stop
        return True

    def clear(self, block_ids: list[int]) -> None:
        """Zero blocks about to be filled: attention gathers whole blocks, and a failed request may have left NaN."""
        # One by one: with a list of indices torch takes twice as long.
        for block_id in block_ids:
            self.data[:, :, block_id] = 0
