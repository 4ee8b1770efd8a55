from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.source_tree import (
    HOUSES,
    ROOT,
    imported_modules,
    name_of,
    product_files,
    python_files,
    syntax_of,
)

SERVER_PACKAGES = {"ray", "fastapi", "starlette", "uvicorn", "pydantic", "asyncio"}
LINT_IMPORTS = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"


def run_linter(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", LINT_IMPORTS], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


def test_imports_go_one_way() -> None:
    run = run_linter(ROOT)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("engine/intruder.py", "import deployments.config"),
        ("engine/intruder.py", "def late():\n    import ray"),
        ("kernels/intruder.py", "import adapters.identity"),
        ("adapters/intruder.py", "import fastapi"),
        ("deployments/intruder.py", "import app.settings"),
        ("engine/request.py", "import torch"),
    ],
)
def test_the_contracts_notice_a_planted_import(tmp_path: Path, module: str, line: str) -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    listed = {entry for contract in contracts for entry in contract.get("source_modules", ()) if "." in entry}
    for house in HOUSES:
        (tmp_path / house).mkdir()
        (tmp_path / house / "__init__.py").touch()
    for entry in (*listed, "deployments.config", "adapters.identity", "app.settings"):
        path = tmp_path.joinpath(*entry.split("."))
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "__init__.py").touch()
        path.with_suffix(".py").touch()
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    assert run_linter(tmp_path).returncode == 0
    (tmp_path / module).write_text(line + "\n")
    run = run_linter(tmp_path)
    assert run.returncode != 0
    assert module.removesuffix(".py").replace("/", ".") in run.stdout


def test_engine_kernels_and_adapters_know_no_server() -> None:
    culprits = {
        name_of(path): sorted(found)
        for path in python_files("engine", "kernels", "adapters")
        if (found := {name.split(".")[0] for name in imported_modules(syntax_of(path))} & SERVER_PACKAGES)
    }
    assert not culprits


def test_the_product_imports_no_tests_and_no_load_tests() -> None:
    culprits = {
        name_of(path): sorted(found)
        for path in product_files()
        if (found := {name.split(".")[0] for name in imported_modules(syntax_of(path))} & {"tests", "loadtest"})
    }
    assert not culprits
