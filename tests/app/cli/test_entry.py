from __future__ import annotations

import io
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


def test_what_the_terminal_cannot_show_ends_no_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an emoji, an answer was said to be from another kind of server."""
    shown = io.BytesIO()
    terminal = io.TextIOWrapper(shown, encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr("app.cli.main.main", lambda: print("ä 🙂"))
    entry.main()
    terminal.flush()
    assert shown.getvalue() == "ä ?\n".encode("latin-1")


def test_the_command_line_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.cli.main.main", lambda: 7)
    assert entry.main() == 7
