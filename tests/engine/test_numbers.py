"""Weights of few bits that become numbers, against packing number by number as the formats are described."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.decoder.reading import read_spec
from engine.errors import CheckpointError
from engine.loading.checkpoint import load_parameters
from kernels.packed_linear_int8.reference import quantize_rows
from tests.engine.checkpoint_folder import random_tensors, read_tensor, write_config, write_stored
from tests.engine.number_checkpoints import CONFIGS, quantize_layers

CPU = torch.device("cpu")
FLOATS = (torch.float32, torch.bfloat16)
Q = "model.layers.1.self_attn.q_proj"
STATE = f"{Q}.weight.quant_state.bitsandbytes__nf4"
# Its MLP has 1,344 numbers in a matrix, which are 21 blocks; its keys 256, which are four.
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def write(folder: Path, kind: str, kept: tuple[str, ...] = (), **more: Any) -> dict[str, torch.Tensor]:
    """Write a checkpoint of few bits, with `more` tensors; return the tensors that it stands for."""
    return write_stored(folder, partial(quantize_layers, kind=kind, kept=kept), CONFIGS[kind], more, **SIZES)


def load(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return dict(load_parameters(str(folder), read_spec(str(folder)), dtype, CPU))


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_parameters_are_what_their_tensors_mean_stacked(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    meant = write(tmp_path, kind)
    found = load(tmp_path, dtype)
    stacked = torch.cat([meant[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    # A scale that is divided by is rounded once more.
    near = (
        {"rtol": 2**-20 if dtype == torch.float32 else 2**-7, "atol": 0.0}
        if kind == "nvfp4"
        else {"rtol": 0, "atol": 0}
    )
    torch.testing.assert_close(found["layers.1.qkv.weight"], stacked.to(dtype), **near)
    torch.testing.assert_close(
        found["layers.0.down.weight"], meant["model.layers.0.mlp.down_proj.weight"].to(dtype), **near
    )
    assert torch.equal(found["head"], meant["lm_head.weight"].to(dtype))
    one = read_tensor(str(tmp_path), read_spec(str(tmp_path)), f"{Q}.weight", dtype)
    torch.testing.assert_close(one, meant[f"{Q}.weight"].to(dtype), **near)


@pytest.mark.parametrize("kind", CONFIGS)
def test_modules_that_a_checkpoint_leaves_as_they_are_stay_so(tmp_path: Path, kind: str) -> None:
    meant = write(tmp_path, kind, kept=("layers.1.self_attn.k_proj", "down_proj"))
    found = load(tmp_path)
    assert torch.equal(found["layers.0.down.weight"], meant["model.layers.0.mlp.down_proj.weight"])
    keys = meant["model.layers.1.self_attn.k_proj.weight"]
    assert torch.equal(found["layers.1.qkv.weight"][32 : 32 + len(keys)], keys)


def test_the_last_block_may_be_a_part_of_one(tmp_path: Path) -> None:
    """Thirty inputs of thirty outputs: fourteen blocks of 64 numbers, and four numbers."""
    odd = {**SIZES, "hidden_size": 30, "head_dim": 6, "num_attention_heads": 5, "num_key_value_heads": 5}
    write_config(tmp_path, **odd)
    stored, meant = quantize_layers(random_tensors(tmp_path), "nf4-nested")
    write_config(tmp_path, **odd, quantization_config=CONFIGS["nf4-nested"])
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path)["layers.0.o.weight"], meant["model.layers.0.self_attn.o_proj.weight"])


def test_scales_of_eight_bits_share_one_by_two_hundred_and_fifty_six(tmp_path: Path) -> None:
    wide = {**SIZES, "hidden_size": 128, "intermediate_size": 160}
    write_config(tmp_path, **wide)
    stored, meant = quantize_layers(random_tensors(tmp_path), "nf4-nested")
    assert len(stored["model.layers.0.mlp.up_proj.weight.nested_absmax"]) == 2
    write_config(tmp_path, **wide, quantization_config=CONFIGS["nf4-nested"])
    save_file(stored, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path)["layers.0.down.weight"], meant["model.layers.0.mlp.down_proj.weight"])


@pytest.mark.parametrize("kind", ["channel", "bnb8"])
def test_integers_of_eight_bits_are_those_that_a_cpu_makes_of_their_numbers(tmp_path: Path, kind: str) -> None:
    """So that `quantization: int8` keeps such a checkpoint as it is; numbers of 16 bits may be near a half."""
    write_config(tmp_path, **SIZES)
    stored, _ = quantize_layers(random_tensors(tmp_path), kind)
    write(tmp_path, kind)
    wanted = stored["model.layers.0.mlp.down_proj.weight"].int()
    exact, near = (quantize_rows(load(tmp_path, dtype)["layers.0.down.weight"])[0].int() for dtype in FLOATS)
    assert torch.equal(exact, wanted)
    assert (near - wanted).abs().max() <= 1
    assert (near != wanted).float().mean() < 0.01


def test_a_configuration_beside_that_of_the_model_is_read(tmp_path: Path) -> None:
    meant = write(tmp_path, "modelopt")
    write_config(tmp_path, **SIZES)
    told = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"producer": {}, "quantization": told}))
    assert torch.equal(load(tmp_path)["layers.0.down.weight"], meant["model.layers.0.mlp.down_proj.weight"])
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": "NVFP4"}))
    with pytest.raises(CheckpointError, match="quantization_config is not a JSON object"):
        read_spec(str(tmp_path))


def test_scales_for_a_cache_are_passed_over(tmp_path: Path) -> None:
    cache = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_proj.v_scale")}
    write(tmp_path, "modelopt", **cache)
    load(tmp_path)


def told(**changes: Any) -> torch.Tensor:
    state = {"blocksize": 64, "shape": [32, 32]} | changes
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("kind", "more", "complaint"),
    [
        ("nf4", {STATE: told(blocksize=128)}, "128.*numbers in blocks of {'blocksize': 64}"),
        ("nf4", {STATE: told(shape=[32, 30])}, "1024 numbers"),
        ("nf4", {STATE: told(shape=None)}, "bitsandbytes__nf4 is not what bitsandbytes writes"),
        ("nf4-nested", {STATE: told(nested_blocksize=256)}, "bitsandbytes__nf4 is not what bitsandbytes writes"),
        ("nf4", {STATE: torch.tensor([255, 0], dtype=torch.uint8)}, "is not what bitsandbytes writes"),
        ("nf4", {f"{Q}.weight.absmax": torch.ones(16, dtype=torch.uint8)}, "absmax has type U8"),
        ("nf4", {f"{Q}.weight": torch.zeros(500, 1, dtype=torch.uint8)}, r"shape \[500, 1\]"),
        ("bnb8", {f"{Q}.SCB": torch.ones(31)}, r"SCB has shape \[31\]"),
        ("bnb8", {f"{Q}.weight_format": torch.tensor(1, dtype=torch.uint8)}, "weight_format is not part of"),
        ("channel", {f"{Q}.weight_zero_point": torch.ones(1)}, "weight_zero_point is not part of"),
        ("channel", {"lm_head.weight": torch.ones(50, 32, dtype=torch.int8)}, "lm_head.weight has type I8"),
        ("nvfp4", {f"{Q}.weight_scale": torch.ones(32, 2)}, "weight_scale has type F32"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path: Path, kind: str, more: dict[str, torch.Tensor], complaint: str) -> None:
    write(tmp_path, kind, **more)
    with pytest.raises(CheckpointError, match=complaint):
        load(tmp_path)
