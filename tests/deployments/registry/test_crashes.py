"""A registry that is killed, wherever it happens: what was answered holds, and nothing half done stays."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.architecture.source_tree import ROOT


@pytest.mark.slow
def test_a_registry_may_die_before_anything_that_it_writes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.deployments.registry.crashing"],
        cwd=ROOT, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 100
