"""The page in a browser: it finds the models and the figures of the server that it came from."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from tests.e2e.server import Server

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium here")]


def test_a_browser_shows_models_and_figures(server: Server) -> None:
    assert BROWSER is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000", "--dump-dom"]
    run = subprocess.run([BROWSER, *options, f"{server.url}/"], capture_output=True, text=True, timeout=120, check=True)
    for name in ("stdlib-chat", "json-answers (adapter of stdlib-chat)"):
        assert f">{name}</option>" in run.stdout
    assert "<dt>tokens/s</dt>" in run.stdout
    assert "<td>gateways</td>" in run.stdout
