from __future__ import annotations

import re
from typing import Any

import pytest

from engine.decoder.stored import parse_stored
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import CheckpointError
from tests.engine.int4_checkpoints import CONFIGS, config_of


def parsed(fields: dict[str, Any]) -> StoredInt4:
    stored = parse_stored(fields, "here")
    assert isinstance(stored, StoredInt4)
    return stored


def test_only_the_first_format_of_gptq_keeps_zero_points_less_one() -> None:
    assert [parsed(CONFIGS[kind]).zero_offset for kind in ("awq", "gptq", "gptq_v2")] == [0, 1, 0]
    newer = {**CONFIGS["gptq"], "format": "gptq_v2"}
    assert parsed(newer).zero_offset == 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("awq", {"bits": 8}),
        ("awq", {"group_size": 16}),
        ("awq", {"group_size": 192}),
        ("awq", {"group_size": 0}),
        ("gptq", {"group_size": None}),
        ("gptq", {"group_size": True}),
        ("awq", {"version": "gemv"}),
        ("awq", {"zero_point": False}),
        ("gptq", {"desc_act": None}),
        ("gptq", {"checkpoint_format": "marlin"}),
        ("gptq", {"pack_dtype": "int16"}),
        ("gptq", {"lm_head": True}),
        ("gptq", {"dynamic": {r"+:.*mlp.*": {"bits": 8}}}),
        ("gptq_v2", {"bits": 3}),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(kind: str, changes: dict[str, Any]) -> None:
    (field,) = changes
    with pytest.raises(
        CheckpointError, match=rf"here: quantization_config\.{field} is {re.escape(repr(changes[field]))}"
    ):
        parsed({**CONFIGS[kind], **changes})


def test_an_order_of_their_own_makes_numbers_of_weights() -> None:
    gptq, packed = (
        parsed(CONFIGS["gptq"] | {"desc_act": True}),
        parsed(config_of("packed", actorder="group")),
    )
    assert [stored.order for stored in (gptq, packed)] == ["g_idx", "weight_g_idx"]
    for stored in (gptq, packed):
        assert not stored.stays
        assert stored.num_bytes(24, 128, 2) == 24 * 128 * 2
        assert f"m.{stored.order}" in stored.tensors("m", (24, 128), None)
    assert parsed(config_of("packed", actorder="static")).stays


def test_modules_may_be_left_out() -> None:
    assert parsed({**CONFIGS["gptq"], "dynamic": {r"-:.*mlp\.gate$": {}}}).group_size == 128


@pytest.mark.parametrize(
    "changes",
    [
        {"num_bits": 8}, {"type": "float"}, {"strategy": "tensor"}, {"actorder": "input"}, {"dynamic": True},
        {"group_size": 16}, {"group_size": None},
    ],
)  # fmt: skip
def test_packed_weights_of_another_kind_are_refused_by_their_field(changes: dict[str, Any]) -> None:
    (field,) = changes
    place = rf"here: quantization_config\.config_groups\.group_0\.weights\.{field} is {changes[field]!r}"
    with pytest.raises(CheckpointError, match=place):
        parsed(config_of("packed", **changes))


def test_inputs_that_are_to_be_rounded_beside_packed_weights_are_refused() -> None:
    fields = config_of("packed")
    fields["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8}
    with pytest.raises(CheckpointError, match="input_activations"):
        parsed(fields)


@pytest.mark.parametrize(
    ("group_size", "good", "bad"),
    [
        (128, (256, 24), (192, 24)),
        (64, (128, 8), (192, 24)),
        (512, (1024, 24), (256, 24)),
        (-1, (384, 24), (192, 24)),
        (32, (128, 24), (128, 20)),
    ],
)
def test_modules_must_be_whole_groups_and_blocks(group_size: int, good: tuple[int, int], bad: tuple[int, int]) -> None:
    stored = parsed({**CONFIGS["awq"], "group_size": group_size})
    stored.check_sizes({"model.layers.0.mlp.up_proj": good}, "here")
    with pytest.raises(CheckpointError, match=rf"up_proj has {bad[0]} inputs and {bad[1]} outputs"):
        stored.check_sizes({"model.layers.0.mlp.up_proj": bad}, "here")
