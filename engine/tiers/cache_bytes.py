"""Copies of blocks between the device's cache and the host, concurrent with computation on the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.kv_cache import KvCache


def launched(device: torch.device) -> torch.cuda.Event | None:
    """Return an event that comes after all that the default stream has been given; None on a CPU."""
    if device.type != "cuda":
        return None
    with torch.cuda.device(device):
        event = torch.cuda.Event()
        event.record(torch.cuda.default_stream(device))
    return event


class CacheBytes:
    """The content of cache blocks as bytes on the host; each copying thread has its own instance.

    On a GPU, copies run on a separate stream and wait for what was launched before they were ordered (`launched`): a
    step under way may still write what is read, or read what is written. Later ones need not be waited for, which would
    take as long as they do: they do not write what is read unless its copy is abandoned, nor use what is filled.
    """

    def __init__(self, cache: KvCache, device: torch.device) -> None:
        self._cache = cache
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def read(self, blocks: Sequence[int], after: torch.cuda.Event | None) -> torch.Tensor:
        """Return the content of blocks, bytes [len(blocks), block_bytes], once the copy is done."""
        if self._stream is None or after is None:
            return self._cache.read(blocks)
        with self._beside(self._stream, after):
            content = self._cache.read(blocks)
            copied = torch.empty(content.shape, dtype=content.dtype, pin_memory=True)
            copied.copy_(content, non_blocking=True)
        return copied

    def write(self, blocks: Sequence[int], contents: Sequence[torch.Tensor], after: torch.cuda.Event | None) -> None:
        """Fill blocks with bytes [block_bytes] each; return once the copy is done."""
        if self._stream is None or after is None:
            self._cache.write(blocks, torch.stack([*contents]))
            return
        with self._beside(self._stream, after):
            arrived = [content.to(self._device, non_blocking=True) for content in contents]
            self._cache.write(blocks, torch.stack(arrived))

    @contextmanager
    def _beside(self, stream: torch.cuda.Stream, after: torch.cuda.Event) -> Iterator[None]:
        """Enqueue on a stream, and wait for it in the end, even on an error: others may use both sides then."""
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            stream.wait_event(after)
            try:
                yield
            finally:
                stream.synchronize()
