"""Copies of blocks between the device's cache and the host, beside whatever the device computes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kv_cache import KvCache


class CacheBytes:
    """What blocks of the cache hold, as bytes on the host; each thread that copies has one of its own.

    On a GPU copies have a stream of their own, and wait for what was launched before them: steps under way may still
    write what is read, or read what is written.
    """

    def __init__(self, cache: KvCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        """Return what blocks hold, bytes [len(blocks), block_bytes], once it is there."""
        if self._stream is None:
            return self._cache.read(blocks)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            content = self._cache.read(blocks)
            copied = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
            copied.copy_(content, non_blocking=True)
            self._stream.synchronize()
        return copied

    def write(self, blocks: Sequence[int], contents: Sequence[torch.Tensor]) -> None:
        """Fill blocks with bytes [block_bytes] each, and return once they are there."""
        if self._stream is None:
            self._cache.write(blocks, torch.stack([*contents]))
            return
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._stream.wait_stream(torch.cuda.default_stream(self._device))
            arrived = [content.to(self._device, non_blocking=True) for content in contents]
            self._cache.write(blocks, torch.stack(arrived))
            self._stream.synchronize()
