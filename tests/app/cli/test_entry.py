from __future__ import annotations

import sys

import pytest

from app.cli import entry


def test_an_interrupted_import_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "app.cli.main":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "app.cli.main", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    assert entry.main() == 130


def test_the_command_line_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.main.main", lambda: 7)
    assert entry.main() == 7
