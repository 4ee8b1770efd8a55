"""Weights of every kind, alone and stacked."""

from __future__ import annotations

import torch

from engine.loading.fp8 import Fp8Weight
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, dense, split, stack
from kernels.streamed_linear.reference import FP8


def int4() -> Int4Weight:
    levels = torch.randint(0, 16, (8, 128), dtype=torch.uint8)
    zeros = torch.full((1, 8), 7, dtype=torch.int32)
    return Int4Weight(levels=levels, scales=torch.rand(1, 8), zeros=zeros, dtype=torch.float32)


def fp8() -> Fp8Weight:
    return Fp8Weight(held=torch.randn(8, 128).to(FP8), scales=torch.rand(8), dtype=torch.float32)


def test_parts_of_one_kind_stay_of_it_and_others_become_numbers() -> None:
    kinds: list[tuple[list[Weight], type]] = [
        ([int4(), int4()], Int4Weight),
        ([fp8(), fp8(), fp8()], Fp8Weight),
        ([fp8(), torch.randn(8, 128)], torch.Tensor),
        ([torch.randn(8, 128)] * 2, torch.Tensor),
    ]
    for parts, kind in kinds:
        found = stack(parts)
        assert isinstance(found, kind)
        assert found.shape == (8 * len(parts), 128)
        assert found.dtype == torch.float32
        assert torch.equal(dense(found), torch.cat([dense(part) for part in parts]))


def test_what_was_stacked_is_taken_apart() -> None:
    plain = torch.randn(8, 128)
    for parts in ([int4(), int4()], [fp8(), fp8()], [plain, plain + 1]):
        whole: Weight = stack(parts)
        assert all(torch.equal(dense(part), dense(found)) for part, found in zip(parts, split(whole, 2), strict=True))
    both = torch.stack([plain, plain + 1])
    assert [part.tolist() for part in split(both, 2)] == both.tolist()
