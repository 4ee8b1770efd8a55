from __future__ import annotations

import pytest

from adapters.module_forms import fitted, part_widths, stored_parts
from tests.adapters.handmade import HIDDEN, INNER, KV, SHAPES

AT, MLP = "model.layers.1.self_attn", "model.layers.1.mlp"
JOINED = fitted(SHAPES, [f"{AT}.qkv_proj", f"{MLP}.gate_up_proj"])


def test_what_has_the_base_s_names_is_left_as_it_is() -> None:
    assert fitted(SHAPES, SHAPES) is SHAPES
    assert fitted(SHAPES, ["model.layers.0.mlp.router"]) == SHAPES


def test_parts_become_one_and_one_is_taken_apart_again() -> None:
    assert JOINED[f"{AT}.qkv_proj"] == (HIDDEN, HIDDEN + 2 * KV)
    assert JOINED[f"{MLP}.gate_up_proj"] == (HIDDEN, 2 * INNER)
    assert not {f"{AT}.q_proj", f"{AT}.v_proj", f"{MLP}.up_proj"} & JOINED.keys()
    # One of the parts had a bias and the others none: there is none of the whole.
    apart = fitted(JOINED, [f"{AT}.k_proj", f"{MLP}.up_proj"])
    assert apart == {name: shape for name, shape in SHAPES.items() if not name.endswith(".bias")}


def test_an_adapter_may_have_other_names_for_one_of_both_only() -> None:
    found = fitted(SHAPES, [f"{AT}.q_proj", f"{MLP}.gate_up_proj"])
    assert {f"{AT}.q_proj", f"{MLP}.gate_up_proj"} <= found.keys()
    assert f"{MLP}.gate_proj" not in found


def test_biases_of_all_parts_are_one_of_the_whole_and_the_reverse() -> None:
    biased = SHAPES | {
        f"{AT.replace('1', n)}.{part}_proj.bias": (width,)
        for n in "01"
        for part, width in zip("qkv", (HIDDEN, KV, KV), strict=True)
    }
    joined = fitted(biased, [f"{AT}.qkv_proj"])
    assert joined[f"{AT}.qkv_proj.bias"] == (HIDDEN + 2 * KV,)
    assert fitted(joined, [f"{AT}.v_proj"]) == biased


@pytest.mark.parametrize(
    ("base", "module", "expected"),
    [
        (SHAPES, f"{AT}.q_proj", [(f"{AT}.q_proj", slice(None))]),
        (SHAPES, f"{MLP}.gate_up_proj", [(f"{MLP}.gate_proj", slice(None)), (f"{MLP}.up_proj", slice(None))]),
        (JOINED, f"{AT}.k_proj", [(f"{AT}.qkv_proj", slice(HIDDEN, HIDDEN + KV))]),
        (JOINED, f"{MLP}.up_proj", [(f"{MLP}.gate_up_proj", slice(INNER, 2 * INNER))]),
    ],
)
def test_it_is_known_which_rows_of_the_base_a_module_is(
    base: dict[str, tuple[int, ...]], module: str, expected: list[tuple[str, slice]]
) -> None:
    assert stored_parts(base, module) == expected


def test_layers_of_different_widths_are_not_taken_for_one_form() -> None:
    other = SHAPES | {f"{MLP}.gate_proj": (HIDDEN, 8), f"{MLP}.up_proj": (HIDDEN, 8)}
    assert "gate_up_proj" not in part_widths(other)
    assert fitted(other, [f"{MLP}.gate_up_proj"]) == other
    lacking = {name: shape for name, shape in SHAPES.items() if not name.endswith("v_proj")}
    assert "qkv_proj" not in part_widths(lacking)
