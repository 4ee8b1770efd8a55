"""What is compiled side by side is what a launch then looks for in Triton's cache."""

from __future__ import annotations

from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from triton.backends.compiler import GPUTarget

from kernels.recording import Launch
from kernels.triton_cache import fill_cache
from tests.architecture.source_tree import ROOT
from tests.interpreter.uninterpreted import run_uninterpreted

LAUNCHES = """
from dataclasses import replace
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from kernels.architecture import pretending
from kernels.recording import recording
from kernels.triton_cache import _NoGpu, fill_cache
from kernels.add_rms_norm.launch import add_rms_norm
from kernels.lora_expand.launch import lora_expand
from kernels.lora_shrink.launch import Tiles, lora_shrink

def launch():
    with pretending("sm_90"):
        x = torch.empty(3, 64, dtype=torch.bfloat16, device="meta")
        add_rms_norm(x, x, x[0], 1e-5)
        # Widths that nothing divides, a rank of 1, and numbers that begin in the middle of others.
        tiles = torch.empty(10, dtype=torch.int64, device="meta")[1:].view(-1, 3)
        odd = torch.empty(3, 33, dtype=torch.float16, device="meta")
        tiles = Tiles(numbers=tiles, count=tiles[0, :1], most=3)
        shrunk = lora_shrink(odd, tiles, entry=1, num_modules=1, max_rank=1)
        lora_expand(odd, shrunk, tiles, entry=1, splits=(33,))

if __name__ == "__main__":
    target = GPUTarget("cuda", 90, 32)
    with recording() as found:
        launch()
    assert len(found) == 3, found
    broken = replace(found[0], module="kernels.nowhere")
    assert fill_cache([found[0], broken], target, 2) == 2
    told = []
    assert fill_cache([*found, broken], target, 2, lambda *numbers: told.append(numbers)) == 3
    assert told == [(1, 3), (2, 3), (3, 3)]
    assert fill_cache(found, target, 2) == 0
    hits = {}
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.update({src.name: cache_hit})
    triton.runtime.driver.set_active(_NoGpu(target))
    run = triton.JITFunction.run
    triton.JITFunction.run = lambda kernel, *args, warmup, **named: run(kernel, *args, warmup=True, **named)
    launch()
    assert hits == dict.fromkeys(("add_rms_norm_kernel", "lora_expand_kernel", "lora_shrink_kernel"), True), hits
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_launch_finds_what_was_compiled_for_it(tmp_path: Path) -> None:
    # A file: other processes import what is run.
    script = tmp_path / "launch.py"
    script.write_text(LAUNCHES)
    run_uninterpreted(str(script), TRITON_CACHE_DIR=str(tmp_path / "cache"), PYTHONPATH=str(ROOT))


def test_killed_processes_are_no_kernels_that_do_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each kernel was logged as one that does not compile, and all were counted as compiled."""
    # Whoever imports the kernel's module is killed, as by a system that is out of memory.
    (tmp_path / "kernel_that_kills.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    launches = [
        Launch(module="kernel_that_kills", kernel="any", signature=(), constants=(("A", at),), aligned=(), options=())
        for at in range(2)
    ]
    with pytest.raises(BrokenProcessPool):
        fill_cache(launches, GPUTarget("cuda", 90, 32), num_processes=1)
    assert "does not compile" not in caplog.text
    assert not any((tmp_path / "cache").iterdir())
