"""Every launch of every kernel compiles for every GPU that we name, without spills and within its shared memory."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from kernels.ahead_of_time import TARGETS
from kernels.architecture import current, pretending
from kernels.recording import recording
from tests.architecture.source_tree import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kernels_compile_and_fit() -> None:
    # A process of its own: in this one kernels are interpreted.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "kernels.ahead_of_time"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    lines = run.stdout.splitlines()[1:]
    assert {line.split()[0] for line in lines} == set(TARGETS)
    families = ("add_rms_norm", "silu_and_multiply", "rope_kv_write", "paged_attention", "combine", "token_choice")
    families += ("lora_shrink", "lora_expand", "lora_gather", "lora_logits")
    for family in (*families, "quantize_rows", "streamed_linear", "from_int4"):
        assert any(f" {family} " in line for line in lines), family


def test_launches_are_shaped_for_the_gpu_that_is_pretended() -> None:
    with pretending("gfx942"):
        assert current() == "gfx942"
    assert current() == ("sm_80" if not torch.cuda.is_available() else current())


def test_recording_ends_with_its_block() -> None:
    import triton

    run = triton.JITFunction.run
    with recording():
        assert triton.JITFunction.run is not run
    assert triton.JITFunction.run is run
