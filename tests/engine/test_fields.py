from __future__ import annotations

import pytest

from engine.decoder.fields import Fields
from engine.errors import CheckpointError


def test_a_field_is_read_or_has_its_default() -> None:
    fields = Fields({"layers": 3, "bias": True, "eps": 1e-5, "gone": None}, "config.json")
    assert (fields.count("layers"), fields.count("gone", 7), fields.count("none", 0, least=0)) == (3, 7, 0)
    assert fields.switch("bias")
    assert not fields.switch("gone")
    assert fields.switch(True)
    assert (fields.positive("eps", 1.0), fields.positive("none", 2.0)) == (1e-5, 2.0)


def test_a_field_of_the_wrong_kind_is_named_with_its_place_and_bound() -> None:
    fields = Fields({"layers": -1, "bias": 1, "eps": "small"}, "config.json")
    with pytest.raises(CheckpointError, match=r"config\.json: layers must be an integer of at least 0, it is -1"):
        fields.count("layers", least=0)
    with pytest.raises(CheckpointError, match="bias must be true or false"):
        fields.switch("bias")
    with pytest.raises(CheckpointError, match="eps must be a positive number"):
        fields.positive("eps", 1.0)
