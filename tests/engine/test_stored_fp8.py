from __future__ import annotations

from typing import Any

import pytest

from engine.decoder.stored import parse_stored
from engine.decoder.stored_fp8 import StoredFp8
from engine.errors import CheckpointError
from tests.engine.fp8_checkpoints import BLOCK, CONFIGS, STATIC, TOKEN, compressed

PLAIN = CONFIGS["fp8"]
GROUP = compressed("channel", TOKEN)["config_groups"]["group_0"]


def test_what_is_read_of_each_kind() -> None:
    found = {kind: parse_stored(fields, "here") for kind, fields in CONFIGS.items()}
    assert found == {
        "channel": StoredFp8(has_row_scales=True),
        "tensor": StoredFp8(),
        "naive": StoredFp8(),
        "weights-only": StoredFp8(has_row_scales=True, rounds_inputs=False),
        "block": StoredFp8(block=BLOCK),
        "fp8": StoredFp8(),
        "fp8-transformers": StoredFp8(scale="weight_scale_inv"),
        "fp8-block": StoredFp8(block=BLOCK, scale="weight_scale_inv"),
    }
    stay = {kind for kind, stored in found.items() if stored.stays}
    assert stay == {"channel", "tensor", "naive", "fp8", "fp8-transformers"}


def test_groups_that_agree_are_one() -> None:
    fields = compressed("tensor", STATIC)
    groups = fields["config_groups"]
    assert parse_stored(fields | {"config_groups": groups | {"group_1": groups["group_0"]}}, "here") == StoredFp8()
    with pytest.raises(CheckpointError, match="config_groups has 2 groups of weights"):
        parse_stored(fields | {"config_groups": groups | {"group_1": GROUP}}, "here")


def test_a_cache_of_few_bits_is_no_affair_of_the_weights() -> None:
    fields = CONFIGS["channel"] | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert parse_stored(fields, "here") == StoredFp8(has_row_scales=True)


def test_sparsity_that_is_none_is_passed_over() -> None:
    fields = CONFIGS["channel"] | {"sparsity_config": {"format": "dense", "global_sparsity": 0.1}}
    assert parse_stored(fields, "here") == StoredFp8(has_row_scales=True)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (PLAIN | {"activation_scheme": None}, "activation_scheme"),
        (PLAIN | {"fmt": "e5m2"}, "fmt"),
        (PLAIN | {"weight_block_size": [128]}, "weight_block_size"),
        (PLAIN | {"weight_block_size": [128, 0]}, "weight_block_size"),
        (CONFIGS["tensor"] | {"transform_config": {"config_groups": {}}}, "transform_config"),
        (CONFIGS["tensor"] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format"),
        (CONFIGS["tensor"] | {"config_groups": {}}, "config_groups"),
        (CONFIGS["tensor"] | {"config_groups": {"g": {"weights": None}}}, "config_groups.g"),
        (CONFIGS["tensor"] | {"config_groups": {"g": GROUP | {"output_activations": {}}}}, "g.output_activations"),
        (CONFIGS["tensor"] | {"config_groups": {"g": GROUP | {"input_activations": 8}}}, "g.input_activations"),
        (compressed("group", TOKEN), "group_0.weights.strategy"),
        (compressed("channel", TOKEN, num_bits=4), "group_0.weights.num_bits"),
        (compressed("channel", TOKEN, type="int"), "group_0.weights.type"),
        (compressed("channel", TOKEN, symmetric=False), "group_0.weights.symmetric"),
        (compressed("channel", TOKEN | {"num_bits": 4}), "group_0.input_activations.num_bits"),
        (compressed("block", TOKEN), "group_0.weights.block_structure"),
    ],
)
def test_what_is_not_read_is_refused_by_its_field(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(CheckpointError, match=rf"here: quantization_config\..*{field} "):
        parse_stored(fields, "here")


def test_only_weights_of_8_bits_have_scales() -> None:
    stored = StoredFp8(has_row_scales=True)
    assert set(stored.tensors("m", (24, 16), "F8_E4M3")) == {"m.weight", "m.weight_scale"}
    assert set(stored.tensors("m", (24, 16), "BF16")) == {"m.weight"} == set(stored.tensors("m", (24, 16), None))
    scale = StoredFp8(block=(16, 24)).tensors("m", (40, 48), "F8_E4M3")["m.weight_scale"]
    assert scale.shapes == ((3, 2),)


def test_bytes_of_a_module() -> None:
    assert StoredFp8().num_bytes(24, 16, 2) == 24 * 16 + 24 * 4
    assert StoredFp8(rounds_inputs=False).num_bytes(24, 16, 2) == 24 * 16 * 2
