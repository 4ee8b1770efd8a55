from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer

from app.settings import Settings
from app.settings_check import tokenizer_mistakes
from tests.deployments.tiny_models import write_tokenizer
from tests.engine.checkpoint_folder import write_checkpoint
from tests.engine.fallback import saved


def test_tokenizers_that_hide_torch_from_transformers_are_read_last(tmp_path: Path) -> None:
    """The check of a model that transformers computes, if only in another application, ended in a traceback."""
    write_checkpoint(tmp_path, vocab_size=write_tokenizer(tmp_path))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    other = saved.save(tmp_path / "other", vocab_size=write_tokenizer(tmp_path / "other"))
    models = [{"name": "base", "path": str(tmp_path)}, {"name": "other", "path": str(other)}]
    applications: list[dict[str, Any]] = [
        {
            "name": f"a{index}",
            "route_prefix": f"/{index}",
            "import_path": "app.builder:build",
            "args": {"models": [model], "registry": None, "batches": None},
        }
        for index, model in enumerate(models)
    ]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": applications}))
    code = "import sys; from app.cli.config_lint import lint_config; print(lint_config(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def with_added_token(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image|>"])
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize(
    ("has_fewer_ids", "has_added_token", "own", "is_good"),
    [
        (False, False, "plain", True),
        (True, False, "plain", True),
        (True, False, None, False),
        (False, True, "plain", False),
        (False, True, "added", True),
        (False, True, None, True),
    ],
)
def test_a_tokenizer_with_ids_that_the_model_lacks_is_refused(
    tmp_path: Path, has_fewer_ids: bool, has_added_token: bool, own: str | None, is_good: bool
) -> None:
    """Clients got status 400 for each prompt with such an id."""
    model, other = tmp_path / "model", tmp_path / "other"
    size = write_tokenizer(other)
    write_tokenizer(model)
    write_checkpoint(model, vocab_size=size - 1 if has_fewer_ids else size)
    if has_added_token:
        with_added_token(other)
    if own == "added":
        with_added_token(model)
    if own is None:
        (model / "tokenizer.json").unlink()
    fields = {"name": "a", "path": str(model), "tokenizer_path": str(other)}
    found = tokenizer_mistakes(Settings.model_validate({"models": [fields]}))
    assert [line.partition(":")[0] for line in found] == ([] if is_good else ["args.models[0].tokenizer_path"])
