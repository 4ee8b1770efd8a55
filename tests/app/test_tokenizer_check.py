from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployments.tiny_models import write_tokenizer
from tests.engine.checkpoint_folder import write_checkpoint
from tests.engine.fallback import saved


@pytest.mark.parametrize("is_alone", [True, False])
def test_tokenizers_that_hide_torch_from_transformers_are_read_last(tmp_path: Path, is_alone: bool) -> None:
    """The check of a model that transformers computes, in the same application or in another, ended in a traceback."""
    write_checkpoint(tmp_path, vocab_size=write_tokenizer(tmp_path))
    settings = tmp_path / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": "Qwen2Tokenizer"}))
    other = saved.save(tmp_path / "other", vocab_size=write_tokenizer(tmp_path / "other"))
    models = [{"name": "base", "path": str(tmp_path)}, {"name": "other", "path": str(other)}]
    parts = [models] if is_alone else [[model] for model in models]
    applications: list[dict[str, Any]] = [
        {
            "name": f"a{index}",
            "route_prefix": f"/{index}",
            "import_path": "app.builder:build",
            "args": {"models": part, "registry": None, "batches": None},
        }
        for index, part in enumerate(parts)
    ]
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"http_options": {"host": "127.0.0.1"}, "applications": applications}))
    code = "import sys; from app.cli.config_lint import lint_config; print(lint_config(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(config)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
