from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from app.cli import config_lint
from engine.errors import CheckpointError


def test_hub_ids_are_fetched_once_each_and_a_failure_has_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        {"name": "here", "path": str(tmp_path), "adapters": [{"name": "a", "path": "org/adapter"}]},
        {"name": "there", "path": "org/model", "tokenizer_path": "org/model", "adapter_folder": "dropped/there"},
    ]
    ours = {"name": "ours", "import_path": "app.builder:build", "args": {"models": models}}
    another = {"name": "another", "import_path": "other:app", "route_prefix": "/other"}
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"applications": [another, ours]}))
    asked: list[str] = []

    def local_folder(path: str) -> Path:
        asked.append(path)
        if path == "org/model":
            raise CheckpointError("no network")
        return tmp_path

    monkeypatch.setattr(config_lint, "local_folder", local_folder)
    args = "applications[1].args"
    assert config_lint.hub_ids(config) == {
        "org/adapter": f"{args}.models[0].adapters[0].path",
        "org/model": f"{args}.models[1].path",
    }
    assert config_lint.fetch(config) == [f"{args}.models[1].path: no network"]
    assert asked == ["org/adapter", "org/model"]
