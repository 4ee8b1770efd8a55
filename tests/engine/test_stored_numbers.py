from __future__ import annotations

import re
from typing import Any

import pytest

from engine.decoder.stored import parse_stored
from engine.decoder.stored_numbers import NVFP4_OF_MODELOPT, StoredBnb4, StoredInt8, StoredNvfp4
from engine.errors import CheckpointError
from tests.engine.number_checkpoints import CONFIGS, FLOATS, INTEGERS, compressed


def test_what_is_read_of_each_kind() -> None:
    found = {kind: parse_stored(fields, "here") for kind, fields in CONFIGS.items()}
    assert found == {
        "channel": StoredInt8(),
        "tensor": StoredInt8(has_row_scales=False),
        "naive": StoredInt8(),
        "bnb8": StoredInt8(scale="SCB", unit=127.0),
        "nf4": StoredBnb4(kind="nf4", is_nested=False),
        "nf4-nested": StoredBnb4(kind="nf4", is_nested=True),
        "fp4": StoredBnb4(kind="fp4", is_nested=False),
        "nvfp4": StoredNvfp4(held="weight_packed", whole_scale="weight_global_scale", divides=True),
        "modelopt": NVFP4_OF_MODELOPT,
    }
    assert not any(stored.stays for stored in found.values())
    assert {stored.num_bytes(24, 16, 2) for stored in found.values()} == {24 * 16 * 2}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (CONFIGS["nf4"] | {"load_in_4bit": False}, "load_in_4bit is False"),
        (CONFIGS["nf4"] | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4'"),
        (CONFIGS["nf4"] | {"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage is 'bfloat16'"),
        (compressed("int-quantized", **INTEGERS | {"num_bits": 4}, strategy="channel"), "weights.num_bits is 4"),
        (compressed("int-quantized", **INTEGERS | {"symmetric": False}, strategy="channel"), "symmetric is False"),
        (compressed("int-quantized", **INTEGERS, strategy="group"), "strategy is 'group'"),
        (compressed("nvfp4-pack-quantized", **FLOATS | {"group_size": 32}), "group_size is 32"),
        (compressed("nvfp4-pack-quantized", **FLOATS | {"type": "int"}), "type is 'int'"),
        (compressed("mxfp8-quantized", **FLOATS), "format is 'mxfp8-quantized'"),
        (CONFIGS["modelopt"] | {"quant_algo": "MIXED_PRECISION"}, "quant_algo is 'MIXED_PRECISION'"),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"here: quantization_config\..*{re.escape(field)}"):
        parse_stored(fields, "here")


def test_inputs_must_be_whole_groups() -> None:
    NVFP4_OF_MODELOPT.check_sizes({"up_proj": (48, 7)}, "here")
    with pytest.raises(CheckpointError, match="here: up_proj has 40 inputs; 16 must divide them"):
        NVFP4_OF_MODELOPT.check_sizes({"up_proj": (40, 7)}, "here")


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_weight_of_floats_has_nothing_beside_it(kind: str) -> None:
    assert set(parse_stored(CONFIGS[kind], "here").tensors("m", (32, 16), "BF16")) == {"m.weight"}
