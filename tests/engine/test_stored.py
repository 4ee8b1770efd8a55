from __future__ import annotations

import pytest

from engine.decoder.stored import parse_stored
from engine.decoder.stored_fp8 import StoredFp8
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import CheckpointError
from tests.engine import fp8_checkpoints, int4_checkpoints


def test_each_method_has_its_layout() -> None:
    fours = map(int4_checkpoints.config_of, int4_checkpoints.KINDS)
    assert all(isinstance(parse_stored(fields, "here"), StoredInt4) for fields in fours)
    assert all(isinstance(parse_stored(fields, "here"), StoredFp8) for fields in fp8_checkpoints.CONFIGS.values())


def test_modelopt_has_the_8_bit_floats_of_others() -> None:
    each = {"FP8": StoredFp8(), "FP8_PER_CHANNEL_PER_TOKEN": StoredFp8(has_row_scales=True)}
    for algorithm, stored in each.items():
        assert parse_stored({"quant_method": "modelopt", "quant_algo": algorithm}, "here") == stored


@pytest.mark.parametrize("method", ["aqlm", None, ["awq"]])
def test_a_method_that_is_not_read_is_named_beside_those_that_are(method: object) -> None:
    with pytest.raises(
        CheckpointError, match=r"here: quantization_config.quant_method is .*compressed-tensors"
    ) as found:
        parse_stored({"quant_method": method}, "here")
    assert repr(method) in str(found.value)


def test_a_configuration_that_is_none_is_refused() -> None:
    with pytest.raises(CheckpointError, match="not a JSON object"):
        parse_stored("awq", "here")
