from __future__ import annotations

import sys
from argparse import ArgumentParser, ArgumentTypeError
from importlib import import_module
from pathlib import Path

import pytest

from loadtest.arguments import (
    above_0,
    add_seed,
    add_token_ids,
    at_least,
    at_least_1,
    counts,
    folder_with,
    http_url,
    make_folder,
    token_ids,
)
from loadtest.workloads import TokenRange

STDLIB_CHAT = Path(__file__).parents[2] / "models" / "stdlib-chat"
NOWHERE = "http://127.0.0.1:1"


def test_a_number_has_a_least() -> None:
    assert at_least_1("1") == 1
    assert at_least(0)("0") == 0
    for wrong in ("0", "-1", "x", "1.5"):
        with pytest.raises(ArgumentTypeError, match=wrong):
            at_least_1(wrong)


def test_a_length_of_time_is_above_0() -> None:
    assert above_0("0.5") == 0.5
    for wrong in ("0", "-1", "x", "nan", "inf"):
        with pytest.raises(ArgumentTypeError):
            above_0(wrong)


def test_a_folder_for_results_is_made_before_they_are_measured(tmp_path: Path) -> None:
    """A report was lost, after minutes of measuring, for want of its folder."""
    make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="no results can be written"):
        make_folder(tmp_path / "file" / "c")


def test_numbers_are_parted_by_commas() -> None:
    assert counts("1,8") == (1, 8)
    for wrong in ("1,", "a", "0,1"):
        with pytest.raises(ArgumentTypeError):
            counts(wrong)


def test_a_folder_has_its_file(tmp_path: Path) -> None:
    with pytest.raises(ArgumentTypeError, match=r"no config\.json"):
        folder_with("config.json")(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert folder_with("config.json")(str(tmp_path)) == str(tmp_path)


def test_a_url_has_a_scheme_and_a_host() -> None:
    assert http_url("https://h:1/") == "https://h:1"
    assert http_url("http://h:1/below/v1/") == "http://h:1/below"
    assert http_url("http://[::1]:8000") == "http://[::1]:8000"
    for wrong in ("h:1", "127.0.0.1:8000", "ftp://h", "http://h:x", "http://", "http://h:0"):
        with pytest.raises(ArgumentTypeError, match="http://host:port"):
            http_url(wrong)


def test_every_run_has_its_own_seed_unless_it_is_given() -> None:
    """A second run of a tool found its prompts in the caches of the servers, but not in that of its own engine."""
    seeds = set()
    for _ in range(3):
        parser = ArgumentParser()
        add_seed(parser)
        seeds.add(parser.parse_args([]).seed)
        assert parser.parse_args(["--seed", "4"]).seed == 4
    assert len(seeds) == 3


def test_a_range_of_token_ids_is_not_empty(capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_token_ids(parser)
    assert token_ids(parser, parser.parse_args(["--first-id", "4", "--last-id", "5"])) == TokenRange(start=4, end=5)
    with pytest.raises(SystemExit):
        token_ids(parser, parser.parse_args(["--first-id", "5", "--last-id", "5"]))
    assert "--first-id 5 must be less than --last-id 5" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "compare --url 127.0.0.1:1",
        "adapter_cost --url ftp://h:1",
        f"overhead --host h:1 --checkpoint {STDLIB_CHAT}",
        f"compare --url {NOWHERE} --words-of /nowhere",
        f"compare --url {NOWHERE} --first-id 5 --last-id 3",
        f"adapter_cost --url {NOWHERE} --first-id 5 --last-id 3",
        "bench_engine smollm2-135m --batches a",
        "bench_engine smollm2-135m --threads 0",
        "cache_tiers /nowhere",
        "drafts smollm2-135m --batches a",
        "drafts smollm2-135m --quantization x",
        "overhead --checkpoint /nowhere",
        f"overload --host {NOWHERE} --users 0",
        "perplexity /nowhere",
        f"perplexity {STDLIB_CHAT} --window 1",
        f"perplexity {STDLIB_CHAT} --text /nowhere",
        f"perplexity {STDLIB_CHAT} --window 2",
        "drafts smollm2-135m --prompt-tokens 3",
        "routing_simulation --replicas 1",
        "routing_simulation --rates 0",
        "run --users a",
        f"soak --url {NOWHERE} --streams 0",
        f"soak --url {NOWHERE} --minutes 0",
        "flood --url h:1 --model m",
        f"adapter_life --url h:1 --admin-key k --folder /nowhere --model-path {STDLIB_CHAT}",
    ],
)
def test_what_is_wrong_is_a_line_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    name, *arguments = line.split()
    tool = import_module(f"loadtest.{name}")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as ended:
        tool.main()
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        f"bench_engine {STDLIB_CHAT} --prompt-tokens 5000",
        f"cache_tiers {STDLIB_CHAT} --tokens 5000",
        f"drafts {STDLIB_CHAT} --prompt-tokens 5000",
        f"perplexity {STDLIB_CHAT} --window 5000",
    ],
)
def test_what_the_engine_refuses_is_a_line_and_no_traceback(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    name, *arguments = line.split()
    tool = import_module(f"loadtest.{name}")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit, match=f"loadtest.{name}: max_model_len: .* context of 2048"):
        tool.main()
