from __future__ import annotations

from typing import Any

import pytest

from engine.decoder.stored_int4 import check_sizes, parse_stored
from engine.errors import CheckpointError
from tests.engine.int4_checkpoints import CONFIGS


def test_only_the_first_format_of_gptq_keeps_zero_points_less_one() -> None:
    assert [parse_stored(CONFIGS[kind], "here").zero_offset for kind in ("awq", "gptq", "gptq_v2")] == [0, 1, 0]
    newer = {**CONFIGS["gptq"], "format": "gptq_v2"}
    assert parse_stored(newer, "here").zero_offset == 0


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("awq", {"quant_method": "bitsandbytes"}),
        ("awq", {"quant_method": None}),
        ("awq", {"bits": 8}),
        ("awq", {"group_size": 64}),
        ("awq", {"group_size": -1}),
        ("awq", {"version": "gemv"}),
        ("awq", {"zero_point": False}),
        ("gptq", {"desc_act": True}),
        ("gptq", {"desc_act": None}),
        ("gptq", {"checkpoint_format": "marlin"}),
        ("gptq", {"pack_dtype": "int16"}),
        ("gptq", {"lm_head": True}),
        ("gptq", {"dynamic": {"-:.*": {}}}),
        ("gptq_v2", {"bits": 3}),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(kind: str, changes: dict[str, Any]) -> None:
    (field,) = changes
    with pytest.raises(CheckpointError, match=rf"here: quantization_config\.{field} is {changes[field]!r}"):
        parse_stored({**CONFIGS[kind], **changes}, "here")


def test_a_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match="no JSON object"):
        parse_stored("awq", "here")


def test_modules_must_be_whole_groups() -> None:
    check_sizes({"model.layers.0.mlp.up_proj": (256, 24)}, "here")
    for shape in ((192, 24), (256, 20)):
        with pytest.raises(CheckpointError, match=rf"up_proj has {shape[0]} inputs and {shape[1]} outputs"):
            check_sizes({"model.layers.0.mlp.up_proj": shape}, "here")
