"""Unpacking of 4-bit weights, against packing number by number as the formats are described."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from safetensors.torch import save_file

from engine.decoder.reading import read_spec
from engine.decoder.stored import parse_stored
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import CheckpointError
from engine.loading.checkpoint import load_parameters
from engine.loading.int4 import AWQ_PLACES, IN_ORDER, Int4Weight, read_int4, unpack
from engine.loading.weight import dense
from kernels.streamed_linear.reference import from_int4
from tests.engine.checkpoint_folder import random_tensors, read_tensor, write_config, write_stored
from tests.engine.int4_checkpoints import AWQ_ORDER, KINDS, config_of, packed_rows, quantize, quantize_layers

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
CPU = torch.device("cpu")
Q = "model.layers.1.self_attn.q_proj"


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 3), columns=st.integers(1, 4), seed=st.integers(0, 1000))
def test_what_is_unpacked_is_what_was_packed(rows: int, columns: int, seed: int) -> None:
    numbers = np.random.default_rng(seed).integers(0, 16, (rows, 8 * columns))
    for order, places in ((tuple(range(8)), IN_ORDER), (AWQ_ORDER, AWQ_PLACES)):
        packed = torch.from_numpy(packed_rows(numbers, order))
        assert torch.equal(unpack(packed, places), torch.from_numpy(numbers).to(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("group", [32, 64, 128, 384, -1])
def test_a_weight_stands_for_what_its_format_says_dense_and_packed(kind: str, group: int) -> None:
    torch.manual_seed(0)
    tensors, meant = quantize(torch.randn(24, 384), kind, group)
    stored = parse_stored(config_of(kind, group), "here")
    assert isinstance(stored, StoredInt4)
    found = read_int4(lambda name: tensors[name.rpartition(".")[2]], "module", stored, torch.float32)
    half = read_int4(lambda name: tensors[name.rpartition(".")[2]], "module", stored, torch.float16)
    assert isinstance(found, Int4Weight)
    assert isinstance(half, Int4Weight)
    assert torch.equal(found.dense(), meant)
    assert torch.equal(from_int4(half.packed()), meant.half())
    assert half.packed().group == (384 if group == -1 else group)


def ordered(kind: str) -> tuple[dict[str, torch.Tensor], torch.Tensor, StoredInt4]:
    """A weight whose inputs were sorted before they were put into groups: its tensors, numbers and layout."""
    place = torch.randperm(384)
    tensors, meant = quantize(torch.randn(24, 384), kind)
    packed, order = ("weight_packed", "weight_g_idx") if kind == "packed" else ("qweight", "g_idx")
    rows = tensors[packed] if kind == "packed" else tensors[packed].t()
    back = torch.from_numpy(packed_rows(unpack(rows, IN_ORDER)[:, place].numpy()))
    tensors[packed] = back if kind == "packed" else back.t()
    tensors[order] = (place // 128).int()
    config = config_of(kind, actorder="group") if kind == "packed" else config_of(kind) | {"desc_act": True}
    stored = parse_stored(config, "here")
    assert isinstance(stored, StoredInt4)
    return tensors, meant[:, place], stored


@pytest.mark.parametrize("kind", ["gptq", "gptq_v2", "packed"])
def test_inputs_in_another_order_than_their_groups_make_numbers(kind: str) -> None:
    torch.manual_seed(0)
    tensors, meant, stored = ordered(kind)
    found = read_int4(lambda name: tensors[name.rpartition(".")[2]], "module", stored, torch.float32)
    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, meant)


@pytest.mark.parametrize("group", [-1, 3])
def test_an_input_of_no_group_is_refused(group: int) -> None:
    tensors, _, stored = ordered("gptq")
    tensors["g_idx"][5] = group
    with pytest.raises(CheckpointError, match=r"module.g_idx names groups of which there are 3"):
        read_int4(lambda name: tensors[name.rpartition(".")[2]], "module", stored, torch.float32)


def test_a_zero_point_of_nought_has_borrowed_from_the_next() -> None:
    """GPTQModel subtracts one from the eight zero points of an integer at once, and adds it likewise."""
    tensors, _ = quantize(torch.randn(16, 128), "gptq_v2")
    zeros = np.random.default_rng(0).integers(0, 16, (1, 16))
    zeros[0, 3:5] = 0
    for of_first, kind in enumerate(("gptq_v2", "gptq")):
        tensors["qzeros"] = torch.from_numpy(packed_rows(zeros)) - of_first * 0x11111111
        stored = parse_stored(config_of(kind, 128), "here")
        assert isinstance(stored, StoredInt4)
        found = read_int4(lambda name: tensors[name.rpartition(".")[2]], "module", stored, torch.float16)
        assert isinstance(found, Int4Weight)
        assert found.zeros.tolist() == zeros.tolist()
        assert torch.equal(from_int4(found.packed()), found.dense())


def write(
    folder: Path, kind: str, group: int = 128, more: dict[str, torch.Tensor] | None = None, **fields: Any
) -> dict[str, torch.Tensor]:
    """Write a checkpoint of 4-bit weights, with `more` tensors; return the tensors that it stands for."""
    quantize = partial(quantize_layers, kind=kind, group=group)
    return write_stored(folder, quantize, config_of(kind, group), more or {}, **fields | SIZES)


@pytest.mark.parametrize(("kind", "group"), [*((kind, 128) for kind in KINDS), ("gptq", 64), ("awq", -1)])
def test_parameters_are_the_modules_stacked(tmp_path: Path, kind: str, group: int) -> None:
    meant = write(tmp_path, kind, group)
    spec = read_spec(str(tmp_path))
    found = dict(load_parameters(str(tmp_path), spec, torch.float32, CPU))
    stacked = torch.cat([meant[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkv"])
    assert isinstance(found["layers.1.qkv.weight"], Int4Weight)
    assert torch.equal(dense(found["layers.1.qkv.weight"]), stacked)
    assert torch.equal(dense(found["head"]), meant["lm_head.weight"])
    assert torch.equal(read_tensor(str(tmp_path), spec, f"{Q}.weight", torch.float32), meant[f"{Q}.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_experts_keep_their_levels_and_what_was_left_as_it_was_its_numbers(tmp_path: Path, kind: str) -> None:
    """Gates are left by all tools; a whole module may be as well."""
    fields = SIZES | {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 3,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "shared_expert_intermediate_size": 128,
    }
    write_config(tmp_path, **fields)
    whole = random_tensors(tmp_path)
    stored, meant = quantize_layers(whole, kind)
    left = "model.layers.1.mlp.shared_expert.down_proj"
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(left)} | {
        f"{left}.weight": whole[f"{left}.weight"]
    }
    write_config(tmp_path, **fields, quantization_config=config_of(kind))
    save_file(stored, tmp_path / "model.safetensors")
    found = dict(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))
    experts = found["layers.1.experts.gate_up"]
    assert isinstance(experts, Int4Weight)
    parts = [f"model.layers.1.mlp.experts.{n}.{part}_proj.weight" for n in range(3) for part in ("gate", "up")]
    assert torch.equal(dense(experts), torch.cat([meant[part] for part in parts]))
    assert torch.equal(dense(found["layers.1.router"]), whole["model.layers.1.mlp.gate.weight"])
    assert torch.equal(dense(found["layers.1.shared_gate"]), whole["model.layers.1.mlp.shared_expert_gate.weight"])
    assert torch.equal(dense(found["layers.1.shared_down.weight"]), whole[f"{left}.weight"])
    assert isinstance(found["layers.0.shared_down.weight"], Int4Weight)


def test_biases_stay_numbers(tmp_path: Path) -> None:
    meant = write(tmp_path, "awq", architectures=["Qwen2ForCausalLM"])
    found = dict(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))
    stacked = torch.cat([meant[f"model.layers.1.self_attn.{name}_proj.bias"] for name in "qkv"])
    assert torch.equal(found["layers.1.qkv.bias"], stacked)
    name = f"{Q}.bias"
    assert torch.equal(read_tensor(str(tmp_path), read_spec(str(tmp_path)), name, torch.float32), meant[name])


@pytest.mark.parametrize("group", [32, 128, -1])
def test_what_comes_along_and_says_nothing_is_passed_over(tmp_path: Path, group: int) -> None:
    groups = torch.arange(128, dtype=torch.int32) // (128 if group == -1 else group)
    write(tmp_path, "gptq", group, {f"{Q}.g_idx": groups, f"{Q}.bias": torch.zeros(128, dtype=torch.float16)})
    assert dict(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({f"{Q}.g_idx": torch.ones(128, dtype=torch.int32)}, f"{Q}.g_idx"),
        ({f"{Q}.bias": torch.ones(128)}, f"{Q}.bias"),
        ({f"{Q}.weight": torch.ones(128, 128)}, rf"{Q}\.[a-z]+"),
        ({"model.layers.7.self_attn.q_proj.bias": torch.zeros(128)}, "model.layers.7.self_attn.q_proj.bias"),
    ],
)
def test_what_comes_along_and_would_change_something_is_refused(
    tmp_path: Path, more: dict[str, torch.Tensor], named: str
) -> None:
    write(tmp_path, "gptq", more=more)
    with pytest.raises(CheckpointError, match=f"{named} is not part of"):
        list(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))


def test_a_packed_tensor_of_another_type_is_named(tmp_path: Path) -> None:
    write(tmp_path, "awq", more={f"{Q}.qweight": torch.zeros(128, 16)})
    with pytest.raises(CheckpointError, match=rf"{Q}.qweight has type F32; known are I32"):
        list(load_parameters(str(tmp_path), read_spec(str(tmp_path)), torch.float32, CPU))
