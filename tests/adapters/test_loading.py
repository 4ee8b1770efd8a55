from __future__ import annotations

from pathlib import Path

import pytest
import torch

from adapters.errors import AdapterError
from adapters.loading import load_adapter
from adapters.registry import reference
from tests.adapters.handmade import SHAPES, make_config, make_tensors, write


def load(folder: Path, dtype: torch.dtype = torch.float32) -> object:
    return load_adapter(reference("demo", str(folder)), SHAPES, 64, dtype)


def test_an_adapter_loads_with_its_scaling_in_b(tmp_path: Path) -> None:
    write(tmp_path, make_config(lora_alpha=2))
    weights = load_adapter(reference("demo", str(tmp_path)), SHAPES, 64, torch.float32)
    projection = weights.projection(1, "q_proj")
    assert projection is not None
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    assert torch.equal(projection.a, make_tensors()[f"{prefix}.lora_A.weight"])
    assert torch.equal(projection.b, make_tensors()[f"{prefix}.lora_B.weight"] * 0.5)
    assert weights.projection(1, "v_proj") is None
    assert weights.max_rank == 4


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused_naming_the_tensor(tmp_path: Path, value: float) -> None:
    tensors = make_tensors()
    name = next(iter(tensors))
    tensors[name][1, 2] = value
    write(tmp_path, tensors=tensors)
    with pytest.raises(AdapterError, match=r"lora_A.* holds NaN or infinity"):
        load(tmp_path)


def test_numbers_that_overflow_in_the_engines_dtype_are_refused(tmp_path: Path) -> None:
    tensors = {key: value * 3e4 for key, value in make_tensors().items()}
    write(tmp_path, make_config(lora_alpha=64), tensors)
    with pytest.raises(AdapterError, match="overflow in float16"):
        load(tmp_path, torch.float16)


def test_files_that_changed_after_the_declaration_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    ref = reference("demo", str(tmp_path))
    write(tmp_path, tensors=make_tensors(seed=1))
    with pytest.raises(AdapterError, match="changed since it was declared"):
        load_adapter(ref, SHAPES, 64, torch.float32)
