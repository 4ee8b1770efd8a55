from __future__ import annotations

import shutil
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels import compiling, native


def test_who_compiles_at_once_disturbs_nobody_and_later_ones_find_it_done(compiler: str, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        paths = list(threads.map(lambda _: compiling.build(tmp_path, compiler), range(2)))
    assert paths[0] == paths[1]
    native.NativeKernels(paths[0])
    compiled_ns = paths[0].stat().st_mtime_ns
    assert compiling.build(tmp_path, compiler) == paths[0]
    assert paths[0].stat().st_mtime_ns == compiled_ns
    assert [path.name for path in tmp_path.iterdir()] == [paths[0].name]


@pytest.mark.parametrize("name", ["g++", "clang++"])
def test_the_kernels_compile_for_a_processor_without_wide_vectors(tmp_path: Path, name: str) -> None:
    """What a compiler does for an older machine must at least be accepted; the plain path is also what ARM takes.

    Clang took an alignment of a `typedef` for an error, and whoever had no other compiler got no kernels.
    """
    if compiling.platform.machine() != "x86_64":
        pytest.skip("-march=haswell is an x86 processor")
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name} here")
    source = tmp_path / "all.cpp"
    source.write_text("".join(f'#include "{path}"\n' for path in compiling.SOURCES))
    # Clang also warns of a loop that stays as it is.
    warnings = ("-Wall", "-Wextra", "-Werror", "-Wno-psabi", *(["-Wno-pass-failed"] if name == "clang++" else []))
    command = [name, *compiling.FLAGS, "-march=haswell", *warnings, str(source), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def quick_compiler(folder: Path) -> tuple[Path, Path]:
    """Return a compiler of empty libraries, and where it notes what it was called with."""
    (compiler := folder / "cxx").write_text("""#!/bin/sh
echo "$@" >> "$0.calls"
while [ $# -gt 1 ]; do shift; done
[ "$1" = --version ] || touch "$1"
""")
    compiler.chmod(0o755)
    return compiler, folder / "cxx.calls"


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


def test_compiling_begun_early_is_found_done(compiler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
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
