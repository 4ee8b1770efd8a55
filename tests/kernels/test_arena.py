from __future__ import annotations

import torch

from kernels.arena import ALIGNMENT, PIECE_BYTES, Arena, lazy_zeros, touch
from tests.kernels.conftest import resident_bytes


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
    before = resident_bytes()
    zeros = lazy_zeros(1 << 30, torch.float32)
    zeros[:: 1 << 28] += 1
    assert resident_bytes() - before < 1 << 28
    assert zeros[: 1 << 20].sum() == 1


def test_touching_takes_memory_and_changes_nothing() -> None:
    zeros = lazy_zeros(32 << 20, torch.uint8)
    zeros[5000] = 7
    before = resident_bytes()
    touch(zeros[: 16 << 20].view(16, -1))
    assert resident_bytes() - before >= 12 << 20
    assert zeros[: 16 << 20].sum() == 7
