"""Adapters of experts, by what a file calls them and by what it says of their shapes."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from adapters.errors import AdapterError
from adapters.peft_format import parse_config
from adapters.tensor_file import read_tensor_file
from adapters.validate import AdaptedModule, validate
from tests.adapters.handmade import HIDDEN, make_config, write

COUNT, INNER = 3, 12
M0, M1 = "model.layers.0.mlp", "model.layers.1.mlp"
SHAPES: dict[str, tuple[int, ...]] = {
    "model.layers.0.self_attn.q_proj": (HIDDEN, HIDDEN),
    f"{M0}.experts.gate_up_proj": (COUNT, HIDDEN, 2, INNER),
    f"{M0}.experts.gate_proj": (COUNT, HIDDEN, INNER),
    f"{M0}.experts.up_proj": (COUNT, HIDDEN, INNER),
    f"{M0}.experts.down_proj": (COUNT, INNER, HIDDEN),
    f"{M0}.shared_expert.gate_proj": (HIDDEN, 20),
    f"{M0}.shared_expert.up_proj": (HIDDEN, 20),
    f"{M0}.shared_expert.down_proj": (20, HIDDEN),
    f"{M1}.gate_proj": (HIDDEN, 24),
}
MIXTRAL: dict[str, tuple[int, ...]] = {
    f"{M0}.experts.gate_up_proj": (COUNT, HIDDEN, 2, INNER),
    f"{M0}.experts.down_proj": (COUNT, INNER, HIDDEN),
    "model.layers.0.block_sparse_moe.experts.w1": (COUNT, HIDDEN, INNER),
    "model.layers.0.block_sparse_moe.experts.w2": (COUNT, INNER, HIDDEN),
}
TRANSPOSED: dict[str, tuple[int, ...]] = {
    f"{M0}.experts.gate_up_proj": (COUNT, HIDDEN, INNER, 2),
    f"{M0}.experts.down_proj": (COUNT, INNER, HIDDEN),
}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GATE_UP = {f"{M0}.experts.base_layer": ((4 * COUNT, HIDDEN), (2 * INNER, 4 * COUNT))}
DOWN = {f"{M0}.experts": ((4 * COUNT, INNER), (HIDDEN, 4 * COUNT))}
STACKED = {"target_modules": [], "target_parameters": STACKS}
ONE = {f"{M0}.experts.1.up_proj": ((4, HIDDEN), (INNER, 4))}
Halves = dict[str, tuple[tuple[int, ...], tuple[int, ...]]]


def check(
    folder: Path,
    config: dict[str, Any],
    halves: Halves,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    beside: dict[str, tuple[int, ...]] | None = None,
) -> dict[tuple[int, str], AdaptedModule]:
    tensors = {
        f"base_model.model.{module}.lora_{half}.weight": torch.zeros(shape)
        for module, pair in halves.items()
        for half, shape in zip("AB", pair, strict=True)
    }
    tensors |= {f"base_model.model.{name}": torch.zeros(shape) for name, shape in (beside or {}).items()}
    entries = read_tensor_file("demo", write(folder, make_config(**config), tensors)).entry_by_name
    parsed = parse_config("demo", json.dumps(make_config(**config)).encode())
    return validate("demo", parsed, entries, shapes, 64)


def test_what_is_for_all_experts_lies_by_the_order_in_which_peft_wraps(tmp_path: Path) -> None:
    layouts = check(tmp_path, STACKED | {"rank_pattern": {"down_proj": 4}, "r": 4}, GATE_UP | DOWN)
    assert set(layouts) == {(0, "experts.gate_up_proj"), (0, "experts.down_proj")}
    assert layouts[0, "experts.down_proj"].a.shape == (12, 12)
    stack = layouts[0, "experts.gate_up_proj"].stack
    assert stack == (COUNT, False, False)
    # Alone either is the one wrapped last.
    for name, (pair,) in (("gate_up_proj", GATE_UP.values()), ("down_proj", DOWN.values())):
        config = STACKED | {"target_parameters": [f"experts.{name}"]}
        assert set(check(tmp_path, config, {f"{M0}.experts": pair})) == {(0, f"experts.{name}")}


def test_ranks_and_scalings_are_those_of_patterns_for_the_parameter(tmp_path: Path) -> None:
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 2}, "alpha_pattern": {f"{M0}.experts.gate_up_proj": 3}}
    halves = DOWN | {f"{M0}.experts.base_layer": ((2 * COUNT, HIDDEN), (2 * INNER, 2 * COUNT))}
    layouts = check(tmp_path, STACKED | patterns, halves)
    assert layouts[0, "experts.gate_up_proj"].scaling == 1.5
    assert layouts[0, "experts.down_proj"].scaling == 2


def test_an_expert_may_lack_any_module(tmp_path: Path) -> None:
    halves = ONE | {f"{M0}.experts.2.down_proj": ((4, INNER), (HIDDEN, 4))}
    config = {"target_modules": ["experts.1.up_proj", "2.down_proj"]}
    assert set(check(tmp_path, config, halves)) == {(0, "experts.1.up_proj"), (0, "experts.2.down_proj")}


def test_mixtral_has_names_of_its_own(tmp_path: Path) -> None:
    at = "model.layers.0.block_sparse_moe.experts"
    halves: Halves = {f"{at}.0.w1": ((4, HIDDEN), (INNER, 4)), f"{at}.2.w2": ((4, INNER), (HIDDEN, 4))}
    for targets in (["w1", "w2"], "all-linear"):
        found = check(tmp_path, {"target_modules": targets}, halves, MIXTRAL)
        assert set(found) == {(0, "experts.0.gate_proj"), (0, "experts.2.down_proj")}


def test_a_router_may_be_a_module_or_a_parameter_and_have_either_name(tmp_path: Path) -> None:
    old, new = "model.layers.0.block_sparse_moe.gate", f"{M0}.gate"
    shapes = MIXTRAL | {old: (HIDDEN, COUNT), new: (HIDDEN, COUNT)}
    matrices = (4, HIDDEN), (COUNT, 4)
    asked = ({"target_modules": ["gate"]}, {"target_modules": [], "target_parameters": ["gate.weight"]})
    for config, name in product(asked, (old, new)):
        assert set(check(tmp_path, config, {name: matrices}, shapes)) == {(0, "router")}
    with pytest.raises(AdapterError, match="are one module of the base"):
        check(tmp_path, asked[0], {old: matrices, new: matrices}, shapes)
    with pytest.raises(AdapterError, match=r"lora_B of .*gate has shape \[8, 4\]"):
        check(tmp_path, asked[0], {new: ((4, HIDDEN), (8, 4))}, shapes)
    with pytest.raises(AdapterError, match=r"use_dora of .*gate is not supported"):
        check(tmp_path, asked[0] | {"use_dora": True}, {new: matrices}, shapes)


def test_the_expert_that_all_tokens_meet_stands_for_an_mlp(tmp_path: Path) -> None:
    halves: Halves = {f"{M0}.shared_expert.up_proj": ((4, HIDDEN), (20, 4))}
    assert set(check(tmp_path, {"target_modules": ["shared_expert.up_proj"]}, halves)) == {(0, "up_proj")}


@pytest.mark.parametrize("only", ["both", "gate_up", "down"])
def test_files_of_peft_before_it_told_in_from_out_are_known_by_their_shapes(tmp_path: Path, only: str) -> None:
    gate_up, down = ((4 * COUNT, 2 * INNER), (HIDDEN, 4 * COUNT)), ((4 * COUNT, HIDDEN), (INNER, 4 * COUNT))
    halves: Halves = {f"{M0}.experts.base_layer": gate_up, f"{M0}.experts": down}
    names = STACKS
    if only != "both":
        halves, names = {f"{M0}.experts": gate_up if only == "gate_up" else down}, [f"mlp.experts.{only}_proj"]
    layouts = check(tmp_path, STACKED | {"target_parameters": names}, halves)
    assert all(layout.stack == (COUNT, False, True) for layout in layouts.values())


def test_where_shapes_do_not_tell_the_version_does(tmp_path: Path) -> None:
    square = {f"{M0}.experts.gate_up_proj": (COUNT, 8, 2, 4), f"{M0}.experts.down_proj": (COUNT, 4, 8)}
    config = STACKED | {"target_parameters": STACKS[:1]}
    halves: Halves = {f"{M0}.experts": ((4 * COUNT, 8), (8, 4 * COUNT))}
    for version in ("0.21.2", "0.19.0.dev0", "nightly", None):
        [layout] = check(tmp_path, config | {"peft_version": version}, halves, square).values()
        assert layout.stack == (COUNT, False, False)
    with pytest.raises(AdapterError, match=r"PEFT before 0\.19"):
        check(tmp_path, config | {"peft_version": "0.18.1"}, halves, square)


def test_what_lies_transposed_was_never_mistaken(tmp_path: Path) -> None:
    layouts = check(tmp_path, STACKED | {"peft_version": "0.17.0"}, GATE_UP | DOWN, TRANSPOSED)
    assert layouts[0, "experts.gate_up_proj"].stack == (COUNT, True, False)
    assert layouts[0, "experts.down_proj"].stack == (COUNT, False, False)
    swapped: Halves = {f"{M0}.experts": ((4 * COUNT, HIDDEN), (INNER, 4 * COUNT))}
    with pytest.raises(AdapterError, match=r"lora_A of .*down_proj has shape \[12, 16\]"):
        check(tmp_path, STACKED | {"target_parameters": STACKS[1:]}, swapped, TRANSPOSED)


@pytest.mark.parametrize(
    ("config", "halves", "beside", "words"),
    [
        (STACKED, DOWN, {}, f"target_parameters name {M0}.experts.gate_up_proj, for which it has no tensors"),
        ({}, DOWN, {}, f"tensors for {M0}.experts, but target_parameters name 0 there"),
        (
            STACKED | {"target_parameters": STACKS[1:]},
            GATE_UP | DOWN,
            {},
            f"tensors for {M0}.experts.base_layer, but target_parameters name 1 there",
        ),
        (STACKED, GATE_UP | {f"{M0}.experts": ((12, INNER + 1), (HIDDEN, 12))}, {}, "lora_A of .*down_proj has shape"),
        (STACKED, GATE_UP | {f"{M0}.experts": ((12, INNER), (HIDDEN, 11))}, {}, "lora_B of .*down_proj has shape"),
        (STACKED | {"r": 5}, GATE_UP | DOWN, {}, r"gate_up_proj has shape \[12, 16\], and the base model needs \[15"),
        (STACKED | {"r": 65}, GATE_UP | DOWN, {}, "has rank 65, more than the 64"),
        (STACKED | {"use_dora": True}, GATE_UP | DOWN, {}, "use_dora of .*experts"),
        (STACKED | {"lora_bias": True}, GATE_UP | DOWN, {}, "lora_bias of .*experts"),
        (
            {"target_modules": ["up_proj"], "use_dora": True},
            ONE,
            {f"{M0}.experts.1.up_proj.lora_magnitude_vector": (INNER,)},
            "lora_magnitude_vector of .*experts.1.up_proj is not supported",
        ),
        ({"target_modules": ["down_proj"]}, ONE, {}, "experts.1.up_proj, which its target_modules do not name"),
        ({"target_modules": ["up_proj"]}, {f"{M0}.experts.3.up_proj": ((4, 16), (12, 4))}, {}, "experts.3.up_proj'"),
        ({"target_modules": ["up_proj"]}, {f"{M0}.experts.1.up_proj": ((4, 16), (11, 4))}, {}, "experts.1.up_proj has"),
        ({"target_modules": ["gate"]}, {f"{M0}.gate": ((4, 16), (COUNT, 4))}, {}, f"no module '{M0}.gate'"),
        (
            {"target_modules": ["shared_expert_gate"]},
            {f"{M0}.shared_expert_gate": ((4, 16), (1, 4))},
            {},
            "shared_expert_gate'",
        ),
        (
            STACKED | {"target_modules": ["1.up_proj"]},
            GATE_UP | DOWN | ONE,
            {},
            "layer 0 it has gate_up_proj of all experts, and experts.1.up_proj besides",
        ),
        ({"target_modules": ["up_proj"]}, {f"{M1}.experts.1.up_proj": ((4, 16), (12, 4))}, {}, "layers.1.mlp.experts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    tmp_path: Path, config: dict[str, Any], halves: Halves, beside: dict[str, tuple[int, ...]], words: str
) -> None:
    with pytest.raises(AdapterError, match=words):
        check(tmp_path, config, halves, beside=beside)
