"""Memory for weights and caches: a few large pieces, on huge pages where the system has them.

What is read from end to end at every step should not also be looked up page by page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

PIECE_BYTES = 64 << 20
ALIGNMENT = 64


class Arena:
    """Hands out tensors side by side; a piece is freed with the last of its tensors."""

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._used = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory [numel], at least one number, aligned to a cache line."""
        num_bytes = numel * dtype.itemsize
        if self._piece is None or self._used + num_bytes > len(self._piece):
            self._piece = _map(max(num_bytes, PIECE_BYTES))
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(self._piece, dtype=dtype, count=numel, offset=start)


def lazy_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros [numel], at least one, that take memory only as they are first touched."""
    return torch.frombuffer(_map(numel * dtype.itemsize), dtype=dtype, count=numel)


def touch(memory: torch.Tensor) -> None:
    """Take memory from the system for contiguous bytes (uint8) ahead of their use; what they hold stays."""
    memory.view(-1)[:: mmap.PAGESIZE].add_(0)


def give_back_memory() -> None:
    """Give the system what the C library keeps of freed memory: as much as the weights, after they were laid out."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _map(num_bytes: int) -> mmap.mmap:
    # Private: huge pages of shared memory are another setting, and mostly off.
    piece = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
