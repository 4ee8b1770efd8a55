"""Matrices laid out for the CPU's products: what lies where is held against one matrix at a time."""

from __future__ import annotations

import pytest
import torch

from engine.cpu.panels import lay_out
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, split, stack
from kernels.arena import Arena
from kernels.program import Pool
from tests.kernels.conftest import pool as pool  # the fixture


def int4(rows: int) -> Int4Weight:
    levels = torch.randint(0, 16, (rows, 128), dtype=torch.uint8)
    scales, zeros = torch.rand(2, rows), torch.randint(0, 17, (2, rows), dtype=torch.int32)
    return Int4Weight(levels=levels, scales=scales, zeros=zeros, dtype=torch.float32)


@pytest.mark.parametrize(
    ("quantization", "has_levels", "kernel"),
    [
        (None, False, "packed_linear"),
        ("int8", False, "packed_linear_int8"),
        ("int4", False, "packed_linear_int4"),
        (None, True, "packed_linear_int4"),
        ("int8", True, "packed_linear_int8"),
    ],
)
def test_many_matrices_lie_behind_each_other(
    pool: Pool, quantization: str | None, has_levels: bool, kernel: str
) -> None:
    each: list[Weight] = [int4(40) if has_levels else torch.randn(40, 128) for _ in range(3)]
    found = lay_out(split(stack(each), 3), 3, quantization, Arena().empty, pool)
    assert (found.kernel, found.out, found.depth) == (kernel, 40, 128)
    for index, matrix in enumerate(each):
        alone = lay_out([matrix], 1, quantization, Arena().empty, pool)
        assert alone.sizes == found.sizes
        for one, of_many in zip(alone.tensors, found.tensors, strict=True):
            assert torch.equal(one[0], of_many[index])
