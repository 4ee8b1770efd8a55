"""What frameworks and other packages do with a running server: each in an environment of its own (`make clients`)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.server import ROOT, Server

CLIENTS = Path(__file__).parent / "clients"
BIN = ROOT / ".venv-clients" / "bin"

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not BIN.exists(), reason="`make clients` installs the packages"),
]


SCRIPTS = sorted(path.name for path in CLIENTS.glob("*_client.*"))


def run(script: str, url: str) -> subprocess.CompletedProcess[str] | None:
    """What a script says of the server; None without what runs it."""
    program = shutil.which("node") if script.endswith(".mjs") else BIN / "python"
    if program is None:
        return None
    command = [program, CLIENTS / script, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)


@pytest.fixture(scope="module")
def ends(server: Server) -> Iterator[dict[str, Future[subprocess.CompletedProcess[str] | None]]]:
    """How each script ends. Two run at a time: most of what they do is to import their packages, by one core."""
    with ThreadPoolExecutor(2) as pool:
        yield {script: pool.submit(run, script, server.url) for script in SCRIPTS}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_framework_works_with_nothing_but_the_url(
    ends: dict[str, Future[subprocess.CompletedProcess[str] | None]], script: str
) -> None:
    done = ends[script].result()
    if done is None:
        pytest.skip("there is no `node` on this machine")
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_request_that_the_document_allows_or_forbids_is_a_failure_of_ours(server: Server, tmp_path: Path) -> None:
    command = [
        BIN / "st", f"--config-file={CLIENTS / 'schemathesis.toml'}", "run", f"{server.url}/openapi.json",
        "--checks", "not_a_server_error", "--phases", "coverage,fuzzing", "--max-examples", "10", "--seed", "1",
        "--request-timeout", "60",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
