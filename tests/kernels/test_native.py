from __future__ import annotations

import logging
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kernels import compiling, native
from kernels.program import Pool


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Forget what was loaded, and compile into an empty folder."""
    native.load.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    yield tmp_path / "antiphon"
    native.load.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_without_a_compiler_torch_does_the_work(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", "")
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
        assert native.load() is None
    assert [record.getMessage() for record in caplog.records] == [
        "cannot compile the CPU kernels; torch operators are used instead: there is no C++ compiler (c++, g++, clang++)"
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo 'no space left' >&2; exit 1", "returned non-zero exit status 1"),
        ('[ "$1" = --version ] && exit 0; echo "all.cpp: no such flag" >&2; exit 1', "no such flag"),
        (
            '[ "$1" = --version ] && exit 0; printf "In file of all.cpp:1:\nx.h:2: error: no wait" >&2; exit 1',
            "failed: x.h:2: error: no wait",
        ),
        ("exit 0", "No such file"),
    ],
    ids=["broken", "refuses", "is too old", "compiles nothing"],
)
def test_a_compiler_that_fails_is_told_and_does_no_harm(
    fresh: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    text: str,
    reason: str,
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", text))
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
    assert reason in caplog.text
    assert not fresh.exists() or not list(fresh.iterdir())


def test_a_cache_that_cannot_be_written_is_told(
    fresh: Path, compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fresh.write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert native.load() is None
    assert "cannot compile the CPU kernels" in caplog.text


def test_a_library_of_other_code_is_not_loaded(tmp_path: Path) -> None:
    target = tmp_path / "kernels.so"
    target.write_bytes(b"not a library")
    with pytest.raises(OSError, match=r"file too short|invalid ELF|not a mach-o"):
        native.NativeKernels(target)


WARNINGS = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi")


def need(compiler: str) -> None:
    """Skip a test where it cannot compile for the x86 processors that it names."""
    if compiling.platform.machine() != "x86_64":
        pytest.skip("these are x86 processors")
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler} here")


def test_clang_takes_the_kernels_without_a_warning(tmp_path: Path) -> None:
    """It took an alignment of a `typedef` for an error, and whoever had no other compiler got no kernels."""
    need("clang++")
    source = tmp_path / "all.cpp"
    source.write_text("".join(f'#include "{path}"\n' for path in compiling.SOURCES))
    flags = (*compiling.FLAGS, *WARNINGS, "-march=haswell", "-fsyntax-only", "-Wno-unused-command-line-argument")
    done = subprocess.run(["clang++", *flags, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("processor", ["haswell", "x86-64"])
def test_plain_vectors_compute_the_same(tmp_path: Path, processor: str) -> None:
    """Compiled without AVX512 and AMX, and without a warning, a product is the same up to rounding.

    And what is stored as bfloat16 is rounded as torch rounds, numbers that are not finite among them. The plain path is
    also what ARM takes.
    """
    need("g++")
    compiler = " ".join(("g++", *WARNINGS))
    # In a process of its own, which can load another library than this one's.
    code = f"""
import torch
from kernels import compiling, native
from kernels.packed_linear.reference import to_panels
from kernels.packed_linear_int4 import reference as int4
from kernels.packed_logits_int8 import reference as int8
from kernels.program import Pool
compiling._target_flags = lambda: ("-march={processor}",)
pool = Pool(native.NativeKernels(compiling.build(compiling.Path({str(tmp_path)!r}), {compiler!r})), 2)
for dtype in (torch.float32, torch.bfloat16):
    for rows in (1, 7, 40):
        x, weight, y = torch.randn(rows, 64).to(dtype), torch.randn(90, 64).to(dtype), torch.empty(rows, 90)
        pool.call("packed_logits", dtype, rows, (x, to_panels(weight), None, y), (64, 90))
        torch.testing.assert_close(y, x.float() @ weight.float().T, atol=1e-3, rtol=1e-4)
        levels, scales, zeros = int4.to_levels(weight)
        held, scaled, wide = int4.to_int4_panels(levels), int4.beside_panels(scales), torch.empty(rows, 90, dtype=dtype)
        beside = int4.beside_panels(zeros)
        pool.call("packed_linear_int4", dtype, rows, (x, held, scaled, beside, None, wide), (64, 90, 64))
        torch.testing.assert_close(wide, int4.packed_linear_int4(x, levels, scales, zeros, None), atol=3e-2, rtol=1e-2)
        pool.call("packed_linear_mxfp4", dtype, rows, (x, held, scaled, None, wide), (64, 90, 64))
        torch.testing.assert_close(wide, int4.packed_linear_mxfp4(x, levels, scales, None), atol=3e-2, rtol=1e-2)
        levels, scales = int8.to_bytes(weight, 64)
        held, scaled = int8.to_byte_panels(levels), int4.beside_panels(scales)
        pool.call("packed_logits_int8", dtype, rows, (x, held, scaled, None, y), (64, 90, 64))
        torch.testing.assert_close(y, int8.packed_logits_int8(x, levels, scales), atol=1e-3, rtol=1e-4)
x, panels = torch.randn(7, 64).bfloat16(), to_panels(torch.randn(90, 64).bfloat16())
x[0, 0], x[1, 0] = float("nan"), float("inf")
y, narrow = torch.empty(7, 90), torch.empty(7, 90, dtype=torch.bfloat16)
pool.call("packed_logits", torch.bfloat16, 7, (x, panels, None, y), (64, 90))
pool.call("packed_linear", torch.bfloat16, 7, (x, panels, None, narrow), (64, 90))
torch.testing.assert_close(narrow, y.bfloat16(), atol=0, rtol=0, equal_nan=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_an_address_belongs_to_a_dtype(pool: Pool) -> None:
    kernels = native.load()
    assert kernels is not None
    assert kernels.address("embed", torch.float32) != kernels.address("embed", torch.bfloat16)
    with pytest.raises(KeyError):
        kernels.address("embed", torch.float16)
