"""8-bit weights of checkpoints, against what plain torch makes of the same tensors."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.decoder.reading import read_spec
from engine.errors import CheckpointError
from engine.loading.checkpoint import load_parameters
from engine.loading.fp8 import Fp8Weight
from engine.loading.weight import dense
from kernels.streamed_linear.reference import FP8
from tests.engine.checkpoint_folder import read_tensor, write_config, write_stored
from tests.engine.fp8_checkpoints import CONFIGS, quantize_layers

CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj"
SIZES = {"hidden_size": 32, "intermediate_size": 56}
STAY = {"channel", "tensor", "naive", "fp8", "fp8-transformers"}


def write(folder: Path, kind: str, kept: tuple[str, ...] = (), **more: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint of 8-bit weights, with `more` tensors; return the tensors that it stands for."""
    return write_stored(folder, partial(quantize_layers, kind=kind, kept=kept), CONFIGS[kind], more, **SIZES)


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_what_their_tensors_mean_stacked(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    meant = write(tmp_path, kind)
    spec = read_spec(str(tmp_path))
    found = dict(load_parameters(str(tmp_path), spec, dtype, CPU))
    stacked = torch.cat([meant[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    qkv = found["layers.1.qkv.weight"]
    assert isinstance(qkv, Fp8Weight) == (kind in STAY)
    assert qkv.shape == stacked.shape
    assert torch.equal(dense(qkv), stacked.to(dtype))
    assert torch.equal(dense(found["layers.0.down.weight"]), meant["model.layers.0.mlp.down_proj.weight"].to(dtype))
    assert torch.equal(dense(found["head"]), meant["lm_head.weight"].to(dtype))
    assert torch.equal(read_tensor(str(tmp_path), spec, f"{Q}.weight", dtype), meant[f"{Q}.weight"].to(dtype))


def test_each_part_keeps_its_scale_where_parts_are_stacked(tmp_path: Path) -> None:
    write(tmp_path, "tensor")
    qkv = dict(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.bfloat16, CPU))["layers.1.qkv.weight"]
    assert isinstance(qkv, Fp8Weight)
    assert qkv.held.dtype == FP8
    assert len(qkv.scales.unique()) == 3


def test_modules_that_a_checkpoint_leaves_as_they_are_stay_so(tmp_path: Path) -> None:
    meant = write(tmp_path, "channel", kept=("layers.1.self_attn.k_proj", "down_proj"))
    found = dict(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))
    assert isinstance(found["layers.0.qkv.weight"], Fp8Weight)
    for name in ("layers.0.down.weight", "layers.1.qkv.weight"):
        assert isinstance(found[name], torch.Tensor)
    stacked = torch.cat([meant[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert torch.equal(found["layers.1.qkv.weight"], stacked)


@pytest.mark.parametrize(
    ("more", "complaint"),
    [
        ({f"{Q}.weight_scale": torch.ones(1)}, r"weight_scale has shape \[1\], config.json says \[32, 1\] or \[32\]"),
        ({f"{Q}.weight_scale": torch.ones(32, 1).to(FP8)}, "weight_scale has type F8_E4M3"),
        ({f"{Q}.weight_zero_point": torch.ones(1)}, "weight_zero_point is not part of"),
        ({"lm_head.weight": torch.ones(50, 32).to(FP8)}, "lm_head.weight has type F8_E4M3"),
        ({"model.norm.input_scale": torch.ones(1)}, "model.norm.input_scale is not part of"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, more: dict[str, torch.Tensor], complaint: str) -> None:
    write(tmp_path, "channel", **more)
    with pytest.raises(CheckpointError, match=complaint):
        list(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))


def test_a_scale_that_is_missing_is_named(tmp_path: Path) -> None:
    write(tmp_path, "channel")
    write_config(tmp_path, **SIZES, quantization_config=CONFIGS["fp8-block"])
    with pytest.raises(CheckpointError, match=r"q_proj.weight_scale_inv is missing"):
        list(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))
