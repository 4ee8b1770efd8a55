from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from loadtest import adapter_life
from loadtest.adapter_life import Admin, checked, main
from loadtest.measure import Exchange
from tests.architecture.source_tree import ROOT
from tests.loadtest.scripted_server import scripted_server


def test_an_answer_that_failed_ends_the_measurement() -> None:
    good = Exchange(workload="w", model="m", started_s=0.0, status=200, error=None, event_ms=[1.0])
    assert checked(good) is good
    with pytest.raises(SystemExit, match="m: gone"):
        checked(Exchange(workload="w", model="m", started_s=0.0, status=503, error="gone"))
    with pytest.raises(SystemExit, match="m: an answer without text"):
        checked(Exchange(workload="w", model="m", started_s=0.0, status=200, error=None))


def test_what_was_loaded_is_unloaded_at_the_end_whatever_happens() -> None:
    """A run that failed left up to a thousand adapters behind."""
    asked: list[dict[str, object]] = []

    def script(body: dict[str, object]) -> tuple[int, bytes]:
        asked.append(body)
        return 200, b"{}"

    with scripted_server(script, key="admin") as url, suppress(KeyError), Admin(url, "admin") as admin:
        for name in ("a", "b"):
            admin.load(name, Path("/somewhere"))
        raise KeyError
    assert [(len(body), body["lora_name"]) for body in asked] == [(3, "a"), (3, "b"), (1, "b"), (1, "a")]


def test_what_was_measured_is_printed_whatever_fails_later(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A failure among the thousand loads, after minutes, lost the rows that had been measured before."""

    def fail(*_arguments: object) -> list[list[str]]:
        raise OSError("gone")

    monkeypatch.setattr(adapter_life, "new_adapters", lambda *_: [["first token", "150", "< 200"]])
    monkeypatch.setattr(adapter_life, "flood", lambda *_: [["beside a flood", "1.2", "< 1.5"]])
    monkeypatch.setattr(adapter_life, "thousand", fail)
    with scripted_server() as url:
        line = f"--url {url} --admin-key k --model-path {ROOT / 'models' / 'stdlib-chat'} --folder {tmp_path}"
        monkeypatch.setattr("sys.argv", ["adapter_life", *line.split()])
        with pytest.raises(SystemExit, match="gone"):
            main()
    said = capsys.readouterr().out
    assert "| first token" in said
    assert "| beside a flood" in said


def test_a_wrong_admin_key_is_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ANTIPHON_API_KEY", "user")
    with scripted_server(key="user") as url:
        line = f"--url {url} --admin-key wrong --model-path {ROOT / 'models' / 'stdlib-chat'} --folder {tmp_path}"
        monkeypatch.setattr("sys.argv", ["adapter_life", *line.split(), "--megabytes", "0.1"])
        with pytest.raises(SystemExit, match="adapter_life: POST /v1/load_lora_adapter: HTTP 401"):
            main()
