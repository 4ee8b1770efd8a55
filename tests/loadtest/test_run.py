from __future__ import annotations

import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadtest.measure import Slo, read_exchanges
from loadtest.run import locust_command, parse, run_users, warm_up
from tests.architecture.source_tree import ROOT
from tests.loadtest.scripted_server import MODELS, answer, scripted_server


def test_the_command_line_becomes_a_plan() -> None:
    line = "--host http://h:1/ --users 2,4 --slo-ttft-ms 5 --max-answer-tokens 9 --seed 3 --models a,b"
    plan = parse(line.split())
    assert (plan.host, plan.users, plan.slo, plan.models) == ("http://h:1", (2, 4), Slo(ttft_ms=5), ("a", "b"))
    command = " ".join(locust_command(plan, 4))
    assert command.endswith("--slo-ttft-ms 5.0 --seed 3 --models a,b --max-answer-tokens 9")
    assert "--slo-tpot-ms" not in command


@pytest.mark.parametrize(
    "arguments",
    [
        ["--users", "0"],
        ["--users", "2,2"],
        ["--users", "x"],
        ["--seconds", "0"],
        ["--host", "h:1"],
        ["--models", ","],
    ],
)
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_warming_up_asks_every_name_once() -> None:
    with scripted_server() as url:
        assert warm_up(url) == ["base", "capitals"]


def test_only_the_models_that_are_loaded_have_to_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedding model beside the others ended every load test, also of the others."""
    data = [{"id": "base"}, {"id": "capitals"}, {"id": "embedder", "task": "embed"}]
    monkeypatch.setitem(MODELS, "data", data)
    with scripted_server(lambda body: answer(body) if body["model"] == "base" else (400, b"no")) as url:
        assert warm_up(url, ("base",)) == ["base"]
        with pytest.raises(SystemExit, match=r"capitals at .* does not answer"):
            warm_up(url)
    with scripted_server() as url:
        assert warm_up(url) == ["base", "capitals"]
        monkeypatch.setitem(MODELS, "data", data[2:])
        with pytest.raises(SystemExit, match="lists no model that generates text"):
            warm_up(url)


def test_a_server_that_refuses_ends_the_run_with_its_words() -> None:
    with (
        scripted_server(lambda _body: (503, b'{"error": {"message": "starting"}}')) as url,
        pytest.raises(SystemExit, match=r"base at .* does not answer: HTTP 503: starting"),
    ):
        warm_up(url)


def test_no_server_is_said_in_one_line() -> None:
    with scripted_server() as url:
        pass
    with pytest.raises(SystemExit, match="no server answers at"):
        warm_up(url)


def test_a_run_that_fails_says_how_the_others_are_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def hang(command: list[str], **options: Any) -> None:
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(SystemExit, match=f"loadtest.report {tmp_path}"):
        run_users(parse(["--out", str(tmp_path)]), 8)


def run_in_a_process(*arguments: str) -> str:
    """Real Locust, in processes of its own: it patches the standard library."""
    command = [sys.executable, "-m", "loadtest.run", *arguments]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_a_run_leaves_everything_in_its_folder_and_asks_nothing_twice(tmp_path: Path) -> None:
    """The runs with more users began with the requests of those with fewer, which the server's prefix cache had."""
    asked: list[str] = []

    def script(body: dict[str, object]) -> list[bytes]:
        asked.append(json.dumps(body))
        return answer(body)

    arguments = ["--users", "1,3", "--seconds", "2", "--slo-ttft-ms", "60000", "--seed", "3"]
    with scripted_server(script) as url:
        said = run_in_a_process("--host", url, "--out", str(tmp_path), *arguments)
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert "| 3 users" in said, said + logs
    left = {path.name for path in tmp_path.iterdir()}
    assert {"table.md", "report.html", "settings.json", "ttft.png", "itl.png", "throughput.png"} <= left
    assert {"records-1.jsonl", "records-3.jsonl", "locust-3.html", "locust-3.log"} <= left
    found = read_exchanges(tmp_path / "records-3.jsonl")
    assert found
    assert all(exchange.is_ok for exchange in found)
    assert len(set(asked)) == len(asked) > 4
    assert "goodput: " in logs
    page = (tmp_path / "locust-3.html").read_text()
    assert all(kind in page for kind in ("TTFT", "ITL", "TPOT"))


def test_a_request_that_hangs_to_the_end_of_its_run_is_an_error_of_it(tmp_path: Path) -> None:
    """Locust ended it, and it was in no record: a server that hung had no errors."""
    num_asked = itertools.count()
    is_over = threading.Event()

    def script(body: dict[str, object]) -> Iterator[bytes]:
        # The first two are the warm-up.
        if next(num_asked) == 2:
            is_over.wait(60)
        yield from answer(body)

    with scripted_server(script) as url:
        arguments = ["--users", "1", "--seconds", "1", "--stop-timeout", "1", "--out", str(tmp_path)]
        said = run_in_a_process("--host", url, *arguments)
        is_over.set()
    assert "1 users: 1 x unanswered when the test ended" in said
