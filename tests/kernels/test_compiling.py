from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels import compiling, native


def quick_compiler(folder: Path, before: str = "") -> tuple[Path, Path]:
    """Return a compiler of empty libraries, and where it notes what it was called with.

    Args:
        before: what it runs before it makes a library.
    """
    (compiler := folder / "cxx").write_text(f"""#!/bin/sh
echo "$@" >> "$0.calls"
while [ $# -gt 1 ]; do shift; done
[ "$1" = --version ] && exit
{before}
touch "$1"
""")
    compiler.chmod(0o755)
    return compiler, folder / "cxx.calls"


def test_of_those_who_compile_at_once_one_does_and_the_others_find_it_done(tmp_path: Path) -> None:
    """A server and each of its replicas compiled; together they were too slow, and went on without kernels."""
    until_both_ask = 'while [ "$(grep -c -e --version "$0.calls")" -lt 2 ]; do sleep 0.01; done'
    compiler, calls = quick_compiler(tmp_path, until_both_ask)
    folder = tmp_path / "cache"
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: compiling.build(folder, str(compiler)), range(2))
    assert first == second
    assert compiling.build(folder, str(compiler)) == first
    assert calls.read_text().count("-std=") == 1
    assert list(folder.iterdir()) == [first]


def test_where_files_cannot_be_locked_those_who_compile_at_once_disturb_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(compiling.fcntl, "flock", unsupported)
    until_both_compile = 'while [ "$(grep -c -e -std= "$0.calls")" -lt 2 ]; do sleep 0.01; done'
    compiler, _ = quick_compiler(tmp_path, until_both_compile)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda _: compiling.build(tmp_path / "cache", str(compiler)), range(2))
    assert first == second
    assert list((tmp_path / "cache").iterdir()) == [first]


def test_options_in_the_name_of_a_compiler_are_its_last_and_make_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in CXX="ccache g++ -m64"; it was looked for as one program of that name."""
    compiler, calls = quick_compiler(tmp_path)
    monkeypatch.setenv("CXX", f"env {compiler} -g -march=x86-64")
    first = compiling.build(tmp_path / "cache")
    asked, compiled = calls.read_text().splitlines()
    assert asked == "--version"
    assert compiled.split()[-5:-3] == ["-g", "-march=x86-64"]
    assert compiling.build(tmp_path / "cache", f"env {compiler}") != first


def test_processors_of_the_same_features_but_other_models_have_libraries_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On ARM, numbers tell the model; Neoverse N1 and Cortex-A76 shared a library tuned for whichever came first."""
    compiler, _ = quick_compiler(tmp_path)
    read, libraries = Path.read_text, set()
    for part in ("0xd0c", "0xd0b"):
        told = f"Features\t: fp asimd asimddp\nCPU implementer\t: 0x41\nCPU part\t: {part}\n"
        monkeypatch.setattr(
            compiling.Path,
            "read_text",
            lambda path, encoding, told=told: told if path == Path("/proc/cpuinfo") else read(path, encoding),
        )
        libraries.add(compiling.build(tmp_path / "cache", str(compiler)))
    assert len(libraries) == 2


NEWER = "neoverse-v1+bf16+i8mm"
"""An ARM processor with matrix instructions; Clang 14 must be told that it has them."""


def compile_for_arm(compiler: str, processor: str, source: str, *flags: str) -> str:
    """Return what a compiler for 64-bit ARM writes to its output, given the source on its input."""
    target = ["--target=aarch64-linux-gnu"] if compiler == "clang++" else []

    def run(text: str, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [compiler, *target, *compiling.FLAGS, f"-mcpu={processor}", "-xc++", "-", "-o-", *flags]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False)

    # Clang compiles for every processor, but may find no headers.
    if shutil.which(compiler) is None or run("#include <thread>", "-E").returncode:
        pytest.skip(f"{compiler} does not compile for ARM here")
    done = run(source, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("compiler", "processor"),
    [
        ("aarch64-linux-gnu-g++", "cortex-a72"),
        ("aarch64-linux-gnu-g++", "neoverse-n1"),
        ("aarch64-linux-gnu-g++", NEWER),
        ("clang++", "neoverse-n1"),
        ("clang++", NEWER),
    ],
)
def test_the_kernels_are_valid_for_64_bit_arm(compiler: str, processor: str) -> None:
    """Its branches, which no compiler for x86 sees: with dot products of bytes, matrix instructions, and without."""
    source = "".join(f'#include "{path}"\n' for path in compiling.SOURCES)
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", "-Wno-unused-command-line-argument")
    compile_for_arm(compiler, processor, source, "-fsyntax-only", *warnings)


@pytest.mark.parametrize(
    ("source", "processor", "instruction"),
    [
        ("packed_linear_int8/cpu.cpp", "neoverse-n1", "sdot"),
        ("packed_linear_int8/cpu.cpp", NEWER, "smmla"),
        ("packed_linear/cpu.cpp", NEWER, "bfmmla"),
        ("packed_linear/cpu.cpp", NEWER, "bfdot"),
        ("program.cpp", "neoverse-n1", "isb"),
    ],
)
def test_64_bit_arm_gets_instructions_of_its_own(source: str, processor: str, instruction: str) -> None:
    """Bytes and bfloat16 were widened before their products; and threads that wait slept at once, as `yield` takes no
    time.
    """
    path = next(path for path in compiling.SOURCES if str(path).endswith(f"/{source}"))
    compiled = compile_for_arm("aarch64-linux-gnu-g++", processor, f'#include "{path}"\n', "-S", "-O1")
    assert f"\t{instruction}" in compiled


def test_a_library_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power cut a library of zeros might have the name, and end every process that loads it."""
    done: list[str] = []
    for name in ("fsync", "replace"):
        act = getattr(compiling.os, name)
        monkeypatch.setattr(compiling.os, name, lambda *given, name=name, act=act: (done.append(name), act(*given)))
    compiling.build(tmp_path / "cache", str(quick_compiler(tmp_path)[0]))
    assert done == ["fsync", "replace"]


def compile_early() -> None:
    compiling.begin()
    for thread in threading.enumerate():
        if thread.name == "compile-kernels":
            thread.join()


def test_compiling_begun_early_is_found_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(quick_compiler(tmp_path)[0]))
    compile_early()
    assert [path.suffix for path in (tmp_path / "antiphon").iterdir()] == [".so"]


def test_compiling_early_without_a_compiler_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_early()
    assert not list(tmp_path.glob("antiphon/*"))


def test_a_user_without_a_home_gets_no_kernels_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number of its own; it ended the start of a server."""

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(compiling.Path, "home", no_home)
    compile_early()
    assert native.load.__wrapped__() is None
