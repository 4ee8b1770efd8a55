from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from app.sampling_defaults import BOUNDS, read_defaults
from app.schemas.chat import ChatCompletionRequest
from engine.errors import CheckpointError
from engine.request import SamplingParams


def defaults(folder: Path, **told: Any) -> dict[str, float]:
    (folder / "generation_config.json").write_text(json.dumps(told))
    return read_defaults(str(folder))


def test_what_makers_say_is_taken_and_what_they_leave_open_is_not(tmp_path: Path) -> None:
    assert read_defaults(str(tmp_path)) == {}
    told = {"do_sample": True, "repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    others = {"eos_token_id": [2, 3], "max_new_tokens": 2048, "min_p": None, "transformers_version": "4.37.0"}
    found = defaults(tmp_path, **told, **others)
    assert found == {"repetition_penalty": 1.05, "temperature": 0.7, "top_p": 0.8, "top_k": 20}
    assert defaults(tmp_path, temperature=1, top_k=-1) == {"temperature": 1.0, "top_k": 0}


def test_each_is_a_parameter_and_a_field_of_requests() -> None:
    assert BOUNDS.keys() <= {field.name for field in fields(SamplingParams)}
    assert BOUNDS.keys() <= ChatCompletionRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "0.7"), ("top_p", 1.5), ("top_k", 2.5), ("top_k", True), ("min_p", [0])],
)
def test_what_no_request_could_say_is_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is "):
        defaults(tmp_path, **{name: value})
