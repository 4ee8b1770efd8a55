from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from adapters import tokenizer_files
from adapters.errors import AdapterError
from adapters.tokenizer_files import TOKENIZER_FILES, check_tokenizer
from tests.adapters.handmade import write_tokenizer

CHAT = Path(__file__).parents[2] / "models" / "stdlib-chat"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base with the words `a` and `b`, and with `<|end|>` and a reserved token beside them."""
    return write_tokenizer(tmp_path / "base", {"<|end|>": 2, "<|reserved|>": 3})


def told(folder: Path, base: Path) -> str:
    with pytest.raises(AdapterError) as refused:
        check_tokenizer("x", str(folder), str(base))
    return refused.value.reason


def put(folder: Path, file: str, content: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / file).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


FORMS: dict[str, Any] = {
    "added_tokens.json": {"<|end|>": 2, "<|tool|>": 3, "<|zzz|>": 40},
    "tokenizer_config.json": {
        "added_tokens_decoder": {
            "40": {"content": "<|zzz|>"},
            "3": {"content": "<|tool|>"},
            "2": {"content": "<|end|>"},
        }
    },
    "tokenizer.json": {"added_tokens": [{"id": 3, "content": "<|tool|>"}, {"id": 2, "content": "<|end|>"}]},
}


@pytest.mark.parametrize("file", FORMS)
def test_a_token_that_the_base_lacks_is_named_also_within_its_vocabulary(tmp_path: Path, base: Path, file: str) -> None:
    """It was served with another tokenization than it was trained with, and nothing said so."""
    folder = put(tmp_path / "adapter", file, FORMS[file])
    assert told(folder, base) == (
        "its tokenizer adds the token '<|tool|>' (3), which the base model's does not have; "
        "tokens that were added for an adapter are not supported"
    )
    check_tokenizer("x", str(folder), None)


@pytest.mark.parametrize("token", ["<|end|>", "b"])
def test_a_token_under_another_id_is_told_with_both(tmp_path: Path, base: Path, token: str) -> None:
    folder = put(tmp_path / "adapter", "added_tokens.json", {token: 7})
    put(folder, "tokenizer_config.json", {"pad_token": token})
    theirs = {"<|end|>": 2, "b": 1}[token]
    assert f"has the token '{token}' as 7, and the base model's as {theirs}; tokens that" in told(folder, base)


@pytest.mark.parametrize("pad", ["[PAD]", {"content": "[PAD]", "special": True}])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_what_changes_no_text_may_be_added(tmp_path: Path, base: Path, file: str, pad: object) -> None:
    folder = put(tmp_path / "adapter", "added_tokens.json", {"<|end|>": 2, "b": 1, "[PAD]": 4})
    assert "adds the token '[PAD]' (4)" in told(folder, base)
    check_tokenizer("x", str(put(folder, file, {"pad_token": pad})), str(base))


def test_the_base_s_own_files_are_not_even_read(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is what they say judged, nor do links to them lead out."""
    put(base, "tokenizer_config.json", {"added_tokens_decoder": "of another form"})
    shutil.copytree(base, tmp_path / "copy")
    (tmp_path / "linked").mkdir()
    for file in os.listdir(base):
        (tmp_path / "linked" / file).symlink_to(base / file)
    monkeypatch.setattr(tokenizer_files, "open_under", None)
    for folder in ("copy", "linked"):
        check_tokenizer("x", str(tmp_path / folder), str(base))


def test_a_base_of_unknown_vocabulary_refuses_nothing(tmp_path: Path, base: Path) -> None:
    folder = put(tmp_path / "adapter", "added_tokens.json", {"<|tool|>": 3})
    for number, content in enumerate(("{", '{"model": {}}', '{"model": {"vocab": 1}}')):
        check_tokenizer("x", str(folder), str(put(tmp_path / f"base{number}", "tokenizer.json", content)))
    check_tokenizer("x", str(folder), str(tmp_path / "nowhere"))
    # Unigram models list pieces with their scores.
    pieces = put(tmp_path / "pieces", "tokenizer.json", {"model": {"vocab": [["a", 0.0], ["b", -1.5]]}})
    assert "adds the token" in told(folder, pieces)
    check_tokenizer("x", str(put(tmp_path / "other", "added_tokens.json", {"b": 1})), str(pieces))


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "\ud800"),
        ("tokenizer.json", "[" * 100_000),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", '"text"'),
        ("added_tokens.json", {"a": "0"}),
        ("added_tokens.json", {"a": True}),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1": "a"}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {"content": "a"}}}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"1" * 5000: {"content": "a"}}}),
        ("tokenizer_config.json", {"pad_token": {"content": ["a"]}}),
        ("tokenizer.json", {"added_tokens": 1}),
        ("tokenizer.json", {"added_tokens": [{"id": 1}]}),
        ("tokenizer.json", {"added_tokens": [{"id": 1, "content": 2}]}),
    ],
)
def test_files_of_another_form_are_refused_by_name(tmp_path: Path, base: Path, file: str, content: Any) -> None:
    (tmp_path / "adapter").mkdir()
    text = content if isinstance(content, str) else json.dumps(content)
    (tmp_path / "adapter" / file).write_bytes(text.encode(errors="surrogatepass"))
    assert told(tmp_path / "adapter", base) == f"{file} is not one of a tokenizer"


def test_no_more_than_a_bound_is_read_and_nothing_but_files(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "adapter", "tokenizer.json", {"version": "1.0"})
    check_tokenizer("x", str(folder), str(base))
    monkeypatch.setattr(tokenizer_files, "MAX_TOKENIZER_BYTES", 8)
    assert told(folder, base) == "tokenizer.json is longer than 8 bytes"
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/etc/hostname")
    assert "leads out" in told(folder, base)
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    assert "not a regular file" in told(folder, base)


def test_a_base_s_vocabulary_is_read_once(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = put(tmp_path / "adapter", "added_tokens.json", {"<|end|>": 2})
    check_tokenizer("x", str(folder), str(base))
    monkeypatch.setattr(json, "load", None)
    check_tokenizer("x", str(folder), str(base))


def test_what_transformers_saves_is_understood(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHAT)
    for added in ([], ["<|tool|>"]):
        tokenizer.add_tokens(added)
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
        tokenizer.padding_side = "right"
        folder = tmp_path / str(len(added))
        tokenizer.save_pretrained(folder)
        assert {"tokenizer.json", "tokenizer_config.json"} <= set(os.listdir(folder)) & set(TOKENIZER_FILES)
        if added:
            assert "adds the token '<|tool|>' (4097)" in told(folder, CHAT)
        else:
            check_tokenizer("x", str(folder), str(CHAT))
