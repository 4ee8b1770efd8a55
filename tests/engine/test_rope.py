from __future__ import annotations

from typing import Any

import pytest

from engine.decoder.rope import parse_rope
from engine.errors import CheckpointError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "short_factor": [1.0 + 0.25 * i for i in range(16)],
    "long_factor": [4.0] * 16,
    "original_max_position_embeddings": 64,
}


def test_the_old_form_and_the_new_say_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    assert parse_rope(old, "here") == parse_rope(new, "here")
    assert parse_rope({"rope_theta": 5e5, "rope_scaling": None}, "here") == parse_rope({"rope_theta": 5e5}, "here")
    assert parse_rope({}, "here").theta == 10000.0
    assert parse_rope({**old, **new}, "here") == parse_rope(new, "here")


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"rope_scaling": {"type": "ntk"}}, "ntk"),
        ({"rope_scaling": {"type": "longrope"}}, "original_max_position_embeddings"),
        ({"rope_scaling": {"type": "su", "original_max_position_embeddings": 64}}, "short_factor"),
        ({"max_position_embeddings": 256, "rope_scaling": {**LONGROPE, "short_factor": 2.0}}, "short_factor"),
        ({"max_position_embeddings": 256, "rope_scaling": {**LONGROPE, "short_factor": [2.0, "3"]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "factor": "8"}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "factor"),
        ({"rope_scaling": {**LLAMA3, "factor": float("nan")}}, "factor"),
        ({"rope_theta": True}, "rope_theta"),
        ({"rope_theta": -1}, "rope_theta"),
        ({"rope_scaling": [1]}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "original_max_position_embeddings"),
        ({"rope_scaling": LLAMA3, "rope_parameters": {"rope_theta": 1e6}}, "rope_scaling"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": {"rope_theta": 1e6}},
            "rope_parameters",
        ),
        (
            {
                "max_position_embeddings": 64,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "truncate": None},
            },
            "truncate",
        ),
    ],
)
def test_a_scaling_that_is_not_known_or_incomplete_is_named(config: dict[str, Any], word: str) -> None:
    with pytest.raises(CheckpointError, match=word) as caught:
        parse_rope(config, "folder/config.json")
    assert str(caught.value).startswith("folder/config.json: ")
