from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.resolve import DEVICES_BY_QUANTIZATION
from loadtest import bench_engine
from loadtest.bench_engine import checkpoint, parse, vocabulary
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from tests.loadtest.test_geometries import SMALL


def bench(
    folder: Path, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[dict[str, Any], str]:
    """Return the JSON that a run of a small model prints, and all that it prints."""
    write_checkpoint(CONFIG_BY_NAME["qwen2.5-0.5b"] | SMALL, folder)
    monkeypatch.setattr(sys, "argv", ["bench", str(folder), "--threads", "1", "--dtype", "float32", *line.split()])
    bench_engine.main()
    said = capsys.readouterr().out
    return json.loads(said.splitlines()[-1]), said


def test_a_checkpoint_is_measured_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--batches 1,3 --prompt-tokens 8 --answer-tokens 4 --repeats 2"
    facts, said = bench(tmp_path, line, monkeypatch, capsys)
    assert [result["batch"] for result in facts["results"]] == [1, 3]
    assert (facts["device"], facts["dtype"], facts["num_threads"]) == ("cpu", "float32", 1)
    assert facts["quantization"] is None
    for result in facts["results"]:
        assert result["prefill_tokens_per_s"] > 0
        assert result["decode_tokens_per_s"] > 0
        assert "wait" in result["decode_ms_by_part"], "a GPU's step spends its time there"
        assert sum(result["decode_ms_by_part"].values()) <= result["decode_step_ms"] * 1.001
    assert "\n| batch" in said


def test_decoding_is_measured_in_steps_of_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts had neither blocks nor time beside others' decoding, and the figure of four rows was the last one's."""
    line = "--batches 4 --prompt-tokens 64 --answer-tokens 16 --repeats 1"
    facts, _ = bench(tmp_path, line, monkeypatch, capsys)
    (result,) = facts["results"]
    assert result["num_prefill_steps"] <= 2
    assert result["num_decode_steps"] >= 14
    assert result["decode_tokens_per_s"] == pytest.approx(4000 / result["decode_step_ms"])


def test_where_no_step_decodes_all_rows_there_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "--batches 4 --prompt-tokens 64 --answer-tokens 3 --repeats 1 --max-batched-tokens 64"
    facts, said = bench(tmp_path, line, monkeypatch, capsys)
    (result,) = facts["results"]
    assert result["decode_tokens_per_s"] is result["decode_step_ms"] is None
    assert re.search(r"^\| 4 .*\| +- \|", said, re.MULTILINE)
    assert "no step decoded 4 requests at once" in said


def test_a_named_geometry_lives_as_long_as_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | SMALL)
    with checkpoint("tiny") as folder:
        assert (folder / "config.json").exists()
        assert vocabulary(folder).end == SMALL["vocab_size"]
        assert vocabulary(folder).start < SMALL["vocab_size"]
    assert not folder.exists()


def test_an_unknown_model_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match=re.escape(", ".join(CONFIG_BY_NAME))), checkpoint("gpt-9"):
        pass


@pytest.mark.parametrize("arguments", [["m", "--batches", "0"], ["m", "--answer-tokens", "1"]])
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "at least" in capsys.readouterr().err


def test_every_quantization_can_be_measured() -> None:
    options = [parse(["m", "--quantization", name]) for name in DEVICES_BY_QUANTIZATION]
    assert [one.quantization for one in options] == ["int8", "fp8", "int4"]


def test_a_model_for_images_has_the_vocabulary_of_its_text(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 1000}, "vision_config": {}}))
    assert vocabulary(tmp_path).end == 1000
