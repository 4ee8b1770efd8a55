"""A kernel that begins early waits before it looks at anything but weights, and only where a GPU can."""

from __future__ import annotations

import re

import pytest

from kernels import overlap
from kernels.architecture import pretending
from tests.interpreter.uninterpreted import run_uninterpreted

TOUCH = re.compile(r"\b(ld\.global|st\.global|cp\.async|atom\.global|red\.global)")
READ_EARLY = {
    "row_kernel",
    "add_rms_norm_kernel",
    "rope_kv_write_kernel",
    "rope_attention_kernel",
    "expert_down_kernel",
    "mxfp4_down_kernel",
    "lora_shrink_kernel",
    "lora_expand_kernel",
}
"""Those that read before they wait: what the step began with, or the kernel before has waited for."""
SHOW = """
from triton.backends.compiler import GPUTarget
from loadtest.gpu import launches
from kernels.architecture import pretending
from kernels.recording import recording
from kernels.triton_cache import compile_launch

with pretending("sm_90"), recording() as found:
    for model, quantization in (
        (launches.QWEN_3, None), (launches.QWEN_3, "fp8"), (launches.QWEN_3_MOE, None), (launches.MXFP4, None)
    ):
        launches.rehearse(model, quantization=quantization)
chosen = {}
for launch in found:
    if "overlaps=True" in launch.title:
        waits = " norm_stride=0 " not in launch.title and "norm_stride" in launch.title
        chosen.setdefault((launch.kernel, launch.title.split()[1], waits), launch)
for (kernel, _, waits), launch in chosen.items():
    print("KERNEL", kernel, waits, compile_launch(launch, GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nothing_is_touched_before_the_kernel_before_has_ended() -> None:
    kernels = run_uninterpreted("-c", SHOW).split("KERNEL ")[1:]
    assert len({text.split()[0] for text in kernels}) == 23
    for text in kernels:
        touches = [match.start() for match in TOUCH.finditer(text)]
        # Programs that have nothing to do wait too, before or behind.
        writes = [at for at in touches if not text.startswith("ld.global", at)]
        early = [at for at in touches if at < text.rindex("griddepcontrol.wait", 0, writes[0])]
        kernel, waits = text.split()[:2]
        # Norms that adapters change are made by the kernel before.
        assert bool(early) == (kernel in READ_EARLY and waits == "False"), kernel
        assert len(touches) > len(early)
        if "_down_kernel" in text.split()[0]:
            # Which experts, and their shares: written within the step.
            assert text[: touches[len(early)]].count("ld.global.cg") >= 2


def test_only_where_it_is_wanted_and_a_gpu_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, pretending("sm_90"):
        patch.setattr(overlap, "CAN_WAIT", False)
        assert overlap.overlap() == {"OVERLAPS": False}
    monkeypatch.setattr(overlap, "CAN_WAIT", True)
    with monkeypatch.context() as patch, pretending("sm_90"):
        patch.setattr(overlap, "IS_WANTED", False)
        assert overlap.overlap() == {"OVERLAPS": False}
    for name, can in (("sm_80", False), ("sm_90", True), ("sm_100", True), ("gfx942", False)):
        with pretending(name):
            assert overlap.overlap()["OVERLAPS"] is can
