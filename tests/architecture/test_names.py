"""`kernels` and `adapters` are import names of packages on the index too: ours must not be mistaken for theirs."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib import metadata

import pytest

from tests.architecture.source_tree import ROOT

TAKEN = ("kernels", "adapters")


def test_transformers_imports_its_models_from_the_root_of_the_repository() -> None:
    """With our `kernels` first on the path transformers looks there for a version; finding one breaks its models."""
    code = "from transformers import LlamaForCausalLM; import kernels; print(kernels.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(ROOT / "kernels" / "__init__.py")


def test_kernels_defines_no_version() -> None:
    assert (ROOT / "kernels" / "__init__.py").read_bytes() == b""


@pytest.mark.parametrize("name", TAKEN)
def test_the_distribution_of_the_same_name_is_not_installed(name: str) -> None:
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.distribution(name)


@pytest.mark.parametrize("name", TAKEN)
def test_the_lock_leaves_out_the_distribution_of_the_same_name(name: str) -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = {match.group(1).lower() for match in re.finditer(r"^([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*==", lock, re.M)}
    assert "torch" in pinned
    assert name not in pinned


def test_the_lock_names_one_version_of_every_dependency() -> None:
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").lower().splitlines()
    pinned = {match.group(1).replace("_", "-") for line in lines if (match := re.fullmatch(r"([\w.-]+)==[\w.]+", line))}
    assert len(pinned) == len(lines)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert {re.split(r"[\[<>=;]", dependency)[0] for dependency in project["dependencies"]} <= pinned
