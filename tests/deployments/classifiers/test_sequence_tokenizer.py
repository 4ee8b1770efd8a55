"""Rows of our own making against those of transformers' tokenizers, read directly and by transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from deployments.classifiers.sequence_checkpoint import SequenceTokenizer
from engine.errors import CheckpointError
from tests.architecture.source_tree import ROOT
from tests.deployments.trained_tokenizers import byte_level, word_piece

TEXTS = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=4)
KINDS = ("guard", "left", "cut_left", "bert")


def with_pairs(tokenizer: Tokenizer) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    tokens = [(text, copy.token_to_id(text)) for text in ("<s>", "</s>")]
    copy.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=tokens
    )
    return copy


def folder_of(kind: str, folder: Path) -> Path:
    if kind == "guard":
        return ROOT / "models" / "guard"
    told = {
        "left": {"padding_side": "left", "model_input_names": ["input_ids", "token_type_ids", "attention_mask"]},
        "cut_left": {"truncation_side": "left", "model_max_length": 20},
        # A class of its own: read by transformers.
        "bert": {"tokenizer_class": "BertTokenizer", "unk_token": "<unk>", "sep_token": "</s>", "cls_token": "<s>"},
    }[kind]
    config = {"tokenizer_class": "TokenizersBackend", "pad_token": "<|end|>", **told}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with_pairs(word_piece() if kind == "bert" else byte_level()).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", params=KINDS)
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[SequenceTokenizer, PreTrainedTokenizerBase]:
    folder = folder_of(request.param, tmp_path_factory.mktemp(request.param))
    return SequenceTokenizer(str(folder)), AutoTokenizer.from_pretrained(folder)


@given(texts=TEXTS, max_tokens=st.integers(12, 40))
def test_windows_are_those_of_transformers(
    both: tuple[SequenceTokenizer, PreTrainedTokenizerBase], texts: list[str], max_tokens: int
) -> None:
    ours, theirs = both
    expected = theirs(
        texts, truncation=True, max_length=max_tokens, stride=max_tokens // 4, return_overflowing_tokens=True
    )
    rows, owners = ours.windows(texts, max_tokens, max_tokens // 4)
    assert owners == expected.pop("overflow_to_sample_mapping")
    assert rows == [dict(zip(expected, row, strict=True)) for row in zip(*expected.values(), strict=True)]
    if any(row["input_ids"] for row in rows):
        padded = theirs.pad(dict(expected), padding_side="right", return_tensors="pt")
        assert {name: numbers.tolist() for name, numbers in ours.padded(rows).items()} == {
            name: numbers.tolist() for name, numbers in padded.items()
        }


@given(texts=TEXTS, max_tokens=st.none() | st.integers(8, 40))
def test_pairs_are_those_of_transformers(
    both: tuple[SequenceTokenizer, PreTrainedTokenizerBase], texts: list[str], max_tokens: int | None
) -> None:
    ours, theirs = both
    options = {"truncation": False} if max_tokens is None else {"truncation": "longest_first", "max_length": max_tokens}
    assert ours.pair(texts[0], texts[-1], max_tokens) == dict(theirs(texts[0], texts[-1], **options))
    assert ours.pair(texts[0], "", max_tokens) == dict(theirs(texts[0], "", **options))
    assert ours.num_special_in_pair() == theirs.num_special_tokens_to_add(pair=True)
    assert ours.max_tokens == theirs.model_max_length


def test_a_tokenizer_without_a_padding_token_is_refused(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "models" / "guard", tmp_path, dirs_exist_ok=True)
    for name, told in (("tokenizer.json", {"padding": None}), ("tokenizer_config.json", {"pad_token": None})):
        (tmp_path / name).write_text(json.dumps(json.loads((tmp_path / name).read_text()) | told))
    with pytest.raises(CheckpointError, match="no padding token"):
        SequenceTokenizer(str(tmp_path))
