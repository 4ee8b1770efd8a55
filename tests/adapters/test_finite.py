from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.finite import find_not_finite
from adapters.tensor_file import read_tensor_file
from tests.adapters.handmade import make_tensors, write


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), None])
def test_a_tensor_that_is_not_finite_is_named(tmp_path: Path, dtype: torch.dtype, value: float | None) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in make_tensors(seed=0).items()}
    bad = sorted(tensors)[1]
    if value is not None:
        tensors[bad].view(-1)[-1] = value
    found = find_not_finite(read_tensor_file("a", write(tmp_path / "a", tensors=tensors)))
    assert found == (None if value is None else bad)
