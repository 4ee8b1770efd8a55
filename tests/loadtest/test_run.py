from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.measure import Slo, read_exchanges
from loadtest.run import locust_command, parse, warm_up
from tests.architecture.source_tree import ROOT
from tests.loadtest.scripted_server import scripted_server


def test_the_command_line_becomes_a_plan() -> None:
    plan = parse(["--host", "http://h:1/", "--users", "2,4", "--slo-ttft-ms", "5", "--max-answer-tokens", "9"])
    assert (plan.host, plan.users, plan.slo) == ("http://h:1", (2, 4), Slo(ttft_ms=5))
    command = locust_command(plan, 4)
    assert command[-4:] == ["--slo-ttft-ms", "5.0", "--max-answer-tokens", "9"]
    assert "--slo-tpot-ms" not in command


@pytest.mark.parametrize("arguments", [["--users", "0"], ["--users", "2,2"], ["--users", "x"], ["--seconds", "0"]])
def test_nonsense_is_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err


def test_warming_up_asks_every_name_once() -> None:
    with scripted_server() as url:
        assert warm_up(url) == ["base", "capitals"]


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


def test_a_run_leaves_everything_in_its_folder(tmp_path: Path) -> None:
    """Real Locust, in processes of its own (it patches the standard library), against a scripted server."""
    arguments = ["--users", "3", "--seconds", "3", "--slo-ttft-ms", "60000", "--out", str(tmp_path), "--seed", "3"]
    with scripted_server() as url:
        run = subprocess.run(
            [sys.executable, "-m", "loadtest.run", "--host", url, *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    logs = "".join(path.read_text() for path in tmp_path.glob("*.log"))
    assert run.returncode == 0, run.stdout + run.stderr + logs
    assert "| 3 users" in run.stdout
    left = {path.name for path in tmp_path.iterdir()}
    assert {"table.md", "report.html", "ttft.png", "itl.png", "throughput.png"} <= left
    assert {"records-3.jsonl", "locust-3.html", "locust-3.log"} <= left
    found = read_exchanges(tmp_path / "records-3.jsonl")
    assert found
    assert all(exchange.is_ok for exchange in found)
    assert "goodput: " in logs
    page = (tmp_path / "locust-3.html").read_text()
    assert all(kind in page for kind in ("TTFT", "ITL", "TPOT"))
