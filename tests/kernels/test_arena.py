from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from kernels.arena import ALIGNMENT, PIECE_BYTES, Arena, lazy_zeros


def test_tensors_do_not_overlap_and_are_aligned() -> None:
    arena = Arena()
    sizes = [1, 17, 63, 1000, PIECE_BYTES // 4, 5, PIECE_BYTES, 7]
    tensors = [arena.empty(size, torch.float32) for size in sizes]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number)
    for number, (size, tensor) in enumerate(zip(sizes, tensors, strict=True)):
        assert tensor.shape == (size,)
        assert tensor.eq(number).all()
        assert tensor.data_ptr() % ALIGNMENT == 0


def test_a_tensor_outlives_its_arena() -> None:
    tensor = Arena().empty(100, torch.bfloat16).fill_(3)
    assert tensor.eq(3).all()


def test_zeros_take_memory_only_where_they_are_touched() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    if not Path("/proc/self/statm").exists():
        pytest.skip("the kernel tells no resident size here")
    before = resident_bytes()
    zeros = lazy_zeros(1 << 30, torch.float32)
    zeros[:: 1 << 28] += 1
    assert resident_bytes() - before < 1 << 28
    assert zeros[: 1 << 20].sum() == 1
