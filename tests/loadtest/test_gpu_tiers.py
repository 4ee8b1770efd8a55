"""The way of blocks to the host and back, on a simulated GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.gpu import __main__ as command
from loadtest.gpu import tiers
from loadtest.gpu.parts import Notes
from loadtest.gpu.sizes import Geometry

GEOMETRY = Geometry(name="tiny", hidden=16, inner=16, heads=2, kv_heads=1, head_dim=8)


@pytest.mark.usefixtures("a_gpu")
def test_both_ways_are_measured_noted_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "LLAMA", GEOMETRY)
    monkeypatch.setattr(tiers, "NUM_LAYERS", 2)
    (part,) = [part for part in command.parts() if part.name == "tiers"]
    part.run(Notes(tmp_path / "notes"))
    found = json.loads((tmp_path / "notes").read_text())["tiers"]
    assert [figure["name"] for figure in found] == ["blocks to the host", "blocks from the host"]
    assert all(figure["bytes_per_s"] > 0 < figure["plain_bytes_per_s"] for figure in found)
    assert "of a plain copy" in capsys.readouterr().out
