from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from app.makers_defaults import READ, read_defaults, read_pooling
from app.schemas.chat import ChatCompletionRequest
from engine.errors import CheckpointError
from engine.request import Pooling, SamplingParams


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
    assert set(READ) <= {field.name for field in fields(SamplingParams)}
    assert set(READ) <= ChatCompletionRequest.model_fields.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1), ("temperature", "0.7"), ("top_p", 1.5), ("top_k", 2.5), ("top_k", True), ("min_p", [0])],
)
def test_what_no_request_could_say_is_named(name: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name} is .*'sampling_defaults: openai'"):
        defaults(tmp_path, **{name: value})


MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
KINDS = ("Transformer", "Pooling", "Normalize")


def write(folder: Path, kinds: tuple[str, ...] = KINDS, **pooling: Any) -> str:
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 1024, **pooling}))
    return str(folder)


def flags(*chosen: str) -> dict[str, bool]:
    return {f"pooling_mode_{mode}": mode in chosen for mode in MODES} | {"include_prompt": True}


def test_a_checkpoint_that_says_nothing_is_read_by_its_last_token(tmp_path: Path) -> None:
    assert read_pooling(str(tmp_path)) is Pooling.LAST
    assert read_pooling(write(tmp_path, ("Transformer", "Normalize"))) is Pooling.LAST


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        (flags("lasttoken"), Pooling.LAST),
        (flags("mean_tokens"), Pooling.MEAN),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
    ],
)
def test_what_its_makers_say_holds(told: dict[str, Any], expected: Pooling, tmp_path: Path) -> None:
    assert read_pooling(write(tmp_path, **told)) is expected


@pytest.mark.parametrize(
    ("told", "word"),
    [
        (flags("cls_token"), "pooling_mode_cls_token"),
        (flags("mean_tokens", "max_tokens"), "pooling_mode_mean_tokens and pooling_mode_max_tokens"),
        (flags(), "None"),
        ({"pooling_mode": "weightedmean"}, "weightedmean"),
    ],
)
def test_what_is_not_computed_is_named(told: dict[str, Any], word: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"1_Pooling/config.json: {word} is not computed.* set 'pooling'"):
        read_pooling(write(tmp_path, **told))


def test_a_module_that_would_change_the_vectors_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"modules\.json: a Dense is not computed.* set 'pooling'"):
        read_pooling(write(tmp_path, ("Transformer", "Pooling", "Dense"), **flags("mean_tokens")))


@pytest.mark.parametrize("module", ["custom_st.Transformer", "Transformer", "other.models.Normalize"])
def test_a_module_of_the_checkpoint_s_own_code_is_named(module: str, tmp_path: Path) -> None:
    """By its last name alone it passed for the library's, whatever it computes."""
    (tmp_path / "modules.json").write_text(json.dumps([{"idx": 0, "name": "0", "path": "", "type": module}]))
    with pytest.raises(CheckpointError, match=rf"modules\.json: a {re.escape(module)} is not computed.* set 'pooling'"):
        read_pooling(str(tmp_path))


@pytest.mark.parametrize("content", ["", "{}", "[1]", "[" * 100_000], ids=["empty", "no array", "no module", "deep"])
def test_files_that_are_broken_are_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"modules\.json"):
        read_pooling(str(tmp_path))
