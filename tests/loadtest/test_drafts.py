from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from engine.scheduling.step_costs import StepCosts
from loadtest import drafts
from loadtest.drafts import dictations, parse, wandering
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from tests.loadtest.test_geometries import SMALL


def test_texts_are_dictated_and_what_drafts_gain_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(StepCosts, "draft_token_s", 0.0)
    write_checkpoint(
        CONFIG_BY_NAME["llama-3.1-8b"] | SMALL | {"vocab_size": 9000, "max_position_embeddings": 256}, tmp_path
    )
    sizes = ["--prompt-tokens", "150", "--answer-tokens", "60", "--repeats", "1", "--threads", "1"]
    monkeypatch.setattr(sys, "argv", ["drafts", str(tmp_path), "--batches", "2", "--texts", "edit,noise", *sizes])
    drafts.main()
    lines = capsys.readouterr().out.splitlines()
    edit, noise = json.loads(lines[-1])["results"]
    assert (edit["text"], noise["text"]) == ("edit", "noise")
    assert edit["tokens_per_step_and_row"] > 1.5
    assert noise["tokens_per_step_and_row"] == pytest.approx(1.0)
    assert edit["share_right"] > 0.5
    assert any(line.startswith("| text") for line in lines)


@pytest.mark.parametrize(("agreement", "least", "most"), [("1.0", 1.0, 1.0), ("0.5", 0.02, 0.6)])
def test_a_draft_model_guesses_as_often_right_as_is_said(
    agreement: str,
    least: float,
    most: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(StepCosts, "draft_token_s", 0.0)
    monkeypatch.setattr(StepCosts, "step_s", lambda self, num_rows: 10.0)
    write_checkpoint(
        CONFIG_BY_NAME["llama-3.1-8b"] | SMALL | {"vocab_size": 9000, "max_position_embeddings": 256}, tmp_path
    )
    sizes = ["--prompt-tokens", "50", "--answer-tokens", "40", "--repeats", "1", "--threads", "1"]
    wanted = ["--batches", "1", "--texts", "noise", "--draft-model", str(tmp_path), "--agreement", agreement]
    monkeypatch.setattr(sys, "argv", ["drafts", str(tmp_path), *wanted, *sizes])
    drafts.main()
    (noise,) = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    assert least <= noise["share_right"] <= most
    assert noise["tokens_per_step_and_row"] > 1.2


def test_texts_are_as_long_as_they_may_be_and_have_tokens_that_the_model_has() -> None:
    texts = dictations(300, 250, 5000)
    assert set(texts) == {"edit", "quotation", "code", "misleading", "noise"}
    for text in texts.values():
        assert len(text.prompt_ids) == 300
        assert 100 < len(text.answer_ids) <= 250
        assert max(*text.prompt_ids, *text.answer_ids) < 5000
    assert texts["edit"].answer_ids != texts["edit"].prediction_ids[:250]


def test_a_wandering_text_is_three_tokens_of_another_at_a_time() -> None:
    ids = wandering(range(100, 200), 10, random.Random(1))
    assert len(ids) == 10
    assert ids[1] - ids[0] == ids[2] - ids[1] == ids[4] - ids[3] == 1


@pytest.mark.parametrize("arguments", [["m", "--batches", "0"], ["m", "--answer-tokens", "5"]])
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "at least" in capsys.readouterr().err
