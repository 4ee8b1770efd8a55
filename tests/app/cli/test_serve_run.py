"""Joining a cluster that is not there. test_server_process.py and tests/e2e/test_stop.py run the rest."""

from __future__ import annotations

from typing import Any

import pytest
import ray

from app.cli import serve_run
from app.cli.server_process import REASON


@pytest.mark.parametrize("address", ["auto", "10.0.0.1:6379"])
def test_a_cluster_that_cannot_be_joined_is_one_line(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster.")

    monkeypatch.setattr(ray, "init", refuse)
    with pytest.raises(SystemExit) as ended:
        serve_run._start_ray(address, has_dashboard=False)
    text = ended.value.code
    assert isinstance(text, str)
    assert text.startswith(f"{REASON}Failed to connect to Ray cluster. ")
    assert "token" in text
    assert "\n" not in text
