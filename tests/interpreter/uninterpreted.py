"""Processes in which kernels are compiled: in that of the tests they are interpreted, and launches cannot be noted."""

from __future__ import annotations

import os
import subprocess
import sys

from app.cli.server_process import kill_session
from tests.architecture.source_tree import ROOT


def run_uninterpreted(*arguments: str, **variables: str) -> str:
    """Run Python in a process of its own, with more environment variables; return what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | variables
    run = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        told, complaints = run.communicate()
    finally:
        # Where time has run out: those that it compiles by would wait for ever, with a gigabyte each.
        kill_session(run.pid)
    assert run.returncode == 0, told[-4000:] + complaints[-4000:]
    return told
