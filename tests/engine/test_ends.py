from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.decoder.ends import eos_ids
from engine.errors import CheckpointError

CONFIG = {"eos_token_id": 2}
ADDED = {"5": {"content": "<|end|>"}, "6": {"content": "<|im_end|>"}}
LISTED = [{"id": int(token_id), **token} for token_id, token in ADDED.items()]


def ends(folder: Path, config: dict[str, Any], **files: Any) -> tuple[int, ...]:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return eos_ids(folder, config, 100)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [3, 4]}, (3, 4)),
        ({}, (2,)),
        ({"eos_token_id": 7}, (7,)),
        ({"eos_token_id": None}, (2,)),
        ({"eos_token_id": [3, -1, 100, 3]}, (3,)),
    ],
)
def test_generation_config_has_the_last_word_on_the_ends(
    tmp_path: Path, generation: dict[str, Any], expected: tuple[int, ...]
) -> None:
    assert ends(tmp_path, CONFIG, generation_config=generation) == expected


@pytest.mark.parametrize("end", ["<|im_end|>", {"__type": "AddedToken", "content": "<|im_end|>"}])
@pytest.mark.parametrize("files", [{}, {"generation_config": {"eos_token_id": [2, 6]}}])
def test_what_the_tokenizer_calls_its_end_is_one(tmp_path: Path, end: object, files: dict[str, Any]) -> None:
    """Fine-tuned with other turns than their base, many checkpoints say so in the tokenizer's files alone."""
    assert ends(tmp_path, CONFIG, tokenizer_config={"eos_token": end, "added_tokens_decoder": ADDED}, **files) == (2, 6)


def test_its_id_is_found_where_only_the_tokenizer_has_it(tmp_path: Path) -> None:
    told = {"eos_token": "<|im_end|>"}
    assert ends(tmp_path, {}, tokenizer_config=told, tokenizer={"added_tokens": LISTED}) == (6,)


def test_a_tokenizer_may_list_thousands_of_tokens(tmp_path: Path) -> None:
    """Every checkpoint of Gemma 3, whose file has 1.16 MB, was refused."""
    added = {str(token_id): {"content": f"<unused{token_id}>", "special": True} for token_id in range(30_000)}
    assert ends(tmp_path, {}, tokenizer_config={"eos_token": "<unused7>", "added_tokens_decoder": added}) == (7,)


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": None, "added_tokens_decoder": ADDED}},
        {"tokenizer_config": {"eos_token": "</s>", "added_tokens_decoder": ADDED}},
        {"tokenizer_config": {"eos_token": "</s>"}},
        {"tokenizer_config": {"eos_token": 5, "added_tokens_decoder": ["x"]}},
        {"tokenizer_config": {"eos_token": "<|end|>", "added_tokens_decoder": {"5": "<|end|>", "x": ADDED["5"]}}},
        {"tokenizer_config": {"eos_token": "<|end|>"}, "tokenizer": {"added_tokens": "many"}},
        {"tokenizer": {"added_tokens": LISTED}},
    ],
)
def test_a_tokenizer_that_says_nothing_ends_nothing(tmp_path: Path, files: dict[str, Any]) -> None:
    assert ends(tmp_path, CONFIG, **files) == (2,)


@pytest.mark.parametrize("value", ["stop", [1, True], 1.5, {"a": 1}])
def test_what_is_no_id_is_named(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="eos_token_id must be token ids"):
        ends(tmp_path, {"eos_token_id": value})
