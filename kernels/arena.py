"""Memory for weights and caches in a few large mappings, on huge pages if the system has them.

Memory that is read end to end at every step should not cause a TLB miss per small page.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap

import torch

PIECE_BYTES = 64 << 20
ALIGNMENT = 64


class Arena:
    """Allocates tensors contiguously within large mappings; a mapping is freed with the last of its tensors."""

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._used = 0

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialized memory [numel], aligned to a cache line. `numel` is at least 1."""
        num_bytes = numel * dtype.itemsize
        if self._piece is None or self._used + num_bytes > len(self._piece):
            self._piece = _map(max(num_bytes, PIECE_BYTES))
            self._used = 0
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return torch.frombuffer(self._piece, dtype=dtype, count=numel, offset=start)


def lazy_zeros(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return zeros [numel] that take physical memory only when first touched. `numel` is at least 1."""
    return torch.frombuffer(_map(numel * dtype.itemsize), dtype=dtype, count=numel)


def touch(memory: torch.Tensor) -> None:
    """Fault in the pages of contiguous bytes (uint8) ahead of their use, keeping their contents."""
    memory.view(-1)[:: mmap.PAGESIZE].add_(0)


def give_back_memory() -> None:
    """Return freed memory that the C library holds to the system: after weights are laid out, as much as their size."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _map(num_bytes: int) -> mmap.mmap:
    # Private, because huge pages of shared memory are a separate setting, usually off.
    piece = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        piece.madvise(mmap.MADV_HUGEPAGE)
    return piece
