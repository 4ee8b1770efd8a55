"""Every launch of every kernel compiles for every GPU that we name, without spills and within its shared memory."""

from __future__ import annotations

import re
from importlib.metadata import version
from types import SimpleNamespace

import pytest
from packaging.version import Version

from kernels.recording import Launch
from loadtest.gpu import ahead_of_time
from loadtest.gpu.ahead_of_time import USUAL_TARGETS
from tests.architecture.source_tree import ROOT
from tests.interpreter.uninterpreted import run_uninterpreted


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("every", "every_of_others"),
    [(12, 32), pytest.param(1, 1, marks=[pytest.mark.thorough, pytest.mark.timeout(5400)])],
)
def test_all_kernels_compile_and_fit(every: int, every_of_others: int) -> None:
    """Each of them for each target, in some of the shapes that they are launched in: all take an hour."""
    sources = [file.read_text() for file in (ROOT / "kernels").glob("*/*.py")]
    kernels = {name for source in sources for name in re.findall(r"^def (\w+)_kernel\(", source, re.MULTILINE)}
    others = sorted(set(USUAL_TARGETS) - {"sm_90"})
    lines = run_uninterpreted("-m", "loadtest.gpu.ahead_of_time", "sm_90", "--every", str(every)).splitlines()[1:]
    assert {line.split()[4] for line in lines} == kernels
    if Version(version("triton")).release[:2] != (3, 7):
        pytest.skip("for the others, some kernels spill by this compiler: docs/decisions.md")
    lines = run_uninterpreted(
        "-m", "loadtest.gpu.ahead_of_time", *others, "--every", str(every_of_others)
    ).splitlines()[1:]
    assert {line.split()[0] for line in lines} == set(others)
    assert {line.split()[4] for line in lines} == kernels


def test_of_each_kernel_some_launches_are_taken() -> None:
    launches = [SimpleNamespace(kernel=name, number=number) for number in range(7) for name in "ab"]
    launches.append(SimpleNamespace(kernel="c", number=0))
    for start, numbers in ((0, [0, 3, 6]), (1, [1, 4]), (5, [2, 5])):
        found = [(one.kernel, one.number) for one in ahead_of_time.sample(launches, 3, start)]  # type: ignore[arg-type]
        assert found == [("a", n) for n in numbers] + [("b", n) for n in numbers] + [("c", 0)]


SHOW = """
from triton.backends.compiler import GPUTarget
from loadtest.gpu import launches
from kernels.architecture import pretending
from kernels.recording import recording
from kernels.triton_cache import compile_launch

with pretending("sm_90"), recording() as found:
    launches.rehearse(launches.QWEN_3)
for kernel, launch in {launch.kernel: launch for launch in found if launch.kernel.startswith("lora_")}.items():
    print("KERNEL", kernel, compile_launch(launch, GPUTarget("cuda", 90, 32)).asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_matrices_are_read_by_the_widest_loads() -> None:
    """Whatever their ranks, which the compiler does not know: none of their numbers, of two bytes, is read alone."""
    shown = run_uninterpreted("-c", SHOW)
    kernels = {text.split()[0]: text for text in shown.split("KERNEL ")[1:]}
    assert len(kernels) == 4
    for name, text in kernels.items():
        bits = [int(found) for found in re.findall(r"ld\.global[.\w]*\.b(\d+)", text)]
        ahead = [int(found, 16) for found in re.findall(r"cp\.async\.c[ag][^;]*?, (0x\w+)", text)]
        assert bits, name
        assert min(bits) >= 32, name
        assert 16 in ahead or "ld.global.v4.b32" in text, name


def test_a_trap_in_a_kernel_s_place_and_spilled_registers_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler did that to tiles of 128 by 128 whose weights came from registers, and said nothing."""
    made = SimpleNamespace(asm={"ptx": ".entry k()\n{\n\ttrap;\n}\n", "cubin": b""}, metadata=SimpleNamespace(shared=0))
    monkeypatch.setattr(ahead_of_time, "compile_launch", lambda *_: made)
    monkeypatch.setattr(ahead_of_time, "_resources", lambda _: (4, 0))
    launch = Launch(module="m", kernel="k", signature=(), constants=(), aligned=(), options=())
    assert "trap" in (ahead_of_time.compile_for("sm_100", launch).complaint or "")
    made.asm["ptx"] = ".entry k()\n{\n\tret;\n}\n"
    assert ahead_of_time.compile_for("sm_100", launch).complaint is None
    monkeypatch.setattr(ahead_of_time, "_resources", lambda _: (4, 8))
    assert ahead_of_time.compile_for("sm_100", launch).complaint == "8 bytes of registers spilled"


ROUNDED = """
from loadtest.gpu import launches
from loadtest.gpu.ahead_of_time import compile_for
from kernels.architecture import pretending
from kernels.recording import recording

with pretending("sm_90"), recording() as found:
    launches.rehearse(launches.LLAMA, quantization="fp8")
rounding = "quantize_rows_kernel", "add_rms_norm_kernel", "activate_and_multiply_kernel"
for launch in found:
    if launch.kernel in rounding and dict(launch.constants)["LIMIT"]:
        print(launch.kernel, compile_for("sm_90", launch).complaint)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rows_are_rounded_where_they_are_held() -> None:
    """The span of a row was a tensor of one element, and so each thread wrote the whole row to shared memory."""
    told = dict(line.split(maxsplit=1) for line in run_uninterpreted("-c", ROUNDED).splitlines())
    kernels = ("quantize_rows", "add_rms_norm", "activate_and_multiply")
    assert told == {f"{name}_kernel": "None" for name in kernels}


def test_a_tensor_that_leaves_a_layout_of_the_whole_in_every_thread_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    made = SimpleNamespace(asm={"cubin": b""}, metadata=SimpleNamespace(shared=0))
    monkeypatch.setattr(ahead_of_time, "compile_launch", lambda *_: made)
    monkeypatch.setattr(ahead_of_time, "_resources", lambda _: (4, 0))
    launch = Launch(module="m", kernel="k", signature=(), constants=(), aligned=(), options=())
    for num_stores in (50, 1024):
        stores = "\tst.shared.v4.b32 \t[%r1], {%r2, %r3, %r4, %r5};\n" * num_stores
        made.asm["ptx"] = f".entry k()\n{{\n{stores}\tret;\n}}\n"
        complaint = ahead_of_time.compile_for("sm_90", launch).complaint
        assert complaint == (None if num_stores == 50 else "each thread writes 1024 vectors to shared memory")
