from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from engine.loading.mxfp4 import read_mxfp4
from tests.engine.mxfp4_checkpoints import VALUES, quantize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_levels_under_all_usual_scales_are_exact(dtype: torch.dtype) -> None:
    levels = torch.arange(16).repeat(2).view(-1, 2)
    blocks = (levels[:, 0] | levels[:, 1] << 4).to(torch.uint8).expand(1, 1, 200, 16).contiguous()
    scales = torch.arange(27, 227).to(torch.uint8).view(1, 1, -1)
    tensors = {"w_blocks": blocks, "w_scales": scales}
    found = read_mxfp4(tensors.__getitem__, "w", dtype).dense().view(200, 2, 16).double()
    expected = torch.tensor(VALUES).double() * (torch.arange(27, 227).double() - 127).exp2().view(-1, 1, 1)
    assert torch.equal(found, expected.expand(200, 2, 16))


def test_rows_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of numbers that are made a few rows at a time."""
    parts, _ = quantize(torch.randn(3, 64, 10))
    weight = read_mxfp4({f"w_{name}": part for name, part in parts.items()}.__getitem__, "w", torch.float32)
    whole = weight.dense()
    assert torch.equal(weight.rows(10, 20).dense(), whole[10:20])
    monkeypatch.setattr("engine.loading.mxfp4.GROUP_ROWS", 7)
    assert torch.equal(weight.dense(), whole)


def test_numbers_are_those_of_transformers() -> None:
    parts, numbers = quantize(torch.randn(3, 64, 10))
    tensors = {f"w_{name}": part for name, part in parts.items()}
    weight = read_mxfp4(tensors.__getitem__, "w", torch.bfloat16)
    assert weight.shape == (30, 64)
    found = weight.dense().view(3, 10, 64)
    theirs = convert_moe_packed_tensors(parts["blocks"], parts["scales"])  # [experts, in, out]
    assert torch.equal(found.transpose(1, 2), theirs)
    assert torch.equal(theirs.float(), numbers)
