from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernels import native
from loadtest.geometries import write_checkpoint
from loadtest.perplexity import VARIANTS, Piece, Reader, answers, perplexity, windows
from tests.loadtest.test_geometries import small

LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    # Wide enough for the kernels that int8 and int4 need.
    write_checkpoint(small("smollm2-135m") | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}, folder)
    return folder


def test_likelihoods_are_those_of_transformers(folder: Path) -> None:
    token_ids = [5, 9, 2, 40, 33, 21, 8, 8, 13, 60]
    found = Reader.load(str(folder), LENGTH, "float32").negative_log_likelihoods(token_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0]
    expected = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(token_ids[1:]), reduction="none")
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_only_what_follows_the_known_part_counts(folder: Path) -> None:
    reader = Reader.load(str(folder), LENGTH, "float32")
    likelihoods = reader.negative_log_likelihoods([5, 9, 2, 40])
    value, count = perplexity(reader, [Piece(token_ids=(5, 9, 2, 40), first=3)])
    assert count == 1
    assert value == pytest.approx(float(likelihoods[2].exp()), rel=1e-5)
    with pytest.raises(ValueError, match="no token"):
        perplexity(reader, [])


@pytest.mark.parametrize("name", VARIANTS)
def test_every_way_to_hold_the_weights_reads_about_the_same(folder: Path, name: str) -> None:
    if VARIANTS[name][1] is not None and native.load() is None:
        pytest.skip("there is no C++ compiler here")
    pieces = [*windows([index * 7 % 60 for index in range(100)], LENGTH)]
    plain, _ = perplexity(Reader.load(str(folder), LENGTH, "float32"), pieces)
    found, count = perplexity(Reader.load(str(folder), LENGTH, *VARIANTS[name]), pieces)
    assert count == 100 - 5
    assert found == pytest.approx(plain, rel=0.05 if name == "int4" else 0.02)


def test_windows_have_something_to_predict() -> None:
    assert [len(piece.token_ids) for piece in windows(range(10), 4)] == [4, 4, 2]
    assert [len(piece.token_ids) for piece in windows(range(9), 4)] == [4, 4]
    assert [*windows([1], 4)] == []


def test_answers_are_predicted_from_their_questions() -> None:
    tokenizer = AutoTokenizer.from_pretrained("models/stdlib-chat")
    piece = next(answers(tokenizer, 512))
    assert "?" in tokenizer.decode(piece.token_ids[: piece.first])
    assert ": " in tokenizer.decode(piece.token_ids[piece.first :])
