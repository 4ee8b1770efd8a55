"""Copies of blocks between the device's cache and the host, concurrent with computation on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.kv_cache import KvCache


class CacheBytes:
    """The content of cache blocks as bytes on the host; each copying thread has its own instance.

    On a GPU, copies run on a separate stream and wait for all earlier launches: a step under way may still write what
    is read, or read what is written.
    """

    def __init__(self, cache: KvCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return the content of blocks, bytes [len(blocks), block_bytes], once the copy is done."""
        if self._stream is None:
            return self._cache.read(blocks)
        with self._beside(self._stream):
            content = self._cache.read(blocks)
            copied = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
            copied.copy_(content, non_blocking=True)
        return copied

    def write(self, blocks: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Fill blocks with bytes [block_bytes] each; return once the copy is done."""
        if self._stream is None:
            self._cache.write(blocks, torch.stack([*contents]))
            return
        with self._beside(self._stream):
            arrived = [content.to(self._device, non_blocking=True) for content in contents]
            self._cache.write(blocks, torch.stack(arrived))

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Enqueue on a stream, and wait for it in the end, even on an error: others may use both sides then."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_stream(torch.cuda.default_stream(self._device))
            try:
                yield
            finally:
                stream.synchronize()
