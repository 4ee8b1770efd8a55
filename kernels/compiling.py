"""Compiles the CPU kernels, once for each machine, with the machine's own compiler.

Without torch, so that whoever starts a server can begin with it at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCES = (_FOLDER / "program.cpp", *sorted(_FOLDER.glob("*/cpu.cpp")))
HEADERS = tuple(sorted(_FOLDER.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
# Not -ffast-math: numbers that are not finite must stay so, for the engine looks for them.
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared", "-pthread")
COMPILE_TIMEOUT_S = 120


def cache_folder() -> Path:
    """Return where compiled kernels are kept.

    Raises:
        RuntimeError: this user has no home.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "antiphon"


def build(folder: Path, compiler: str | None = None) -> Path:
    """Return the library in `folder`, compiled unless it is there already.

    Args:
        compiler: as in `CXX`, with options or without: "ccache g++ -g"; None for that, or else the first one found.

    Raises:
        RuntimeError: there is no compiler, or it refuses.
        OSError: the compiler is not there, or the folder cannot be written.
        subprocess.SubprocessError: the compiler hangs or is broken.
    """
    words = (compiler or os.environ.get("CXX", "")).split() or [_compiler()]
    command = list(takewhile(lambda word: not word.startswith("-"), words))
    # Of options that contradict each other the last holds.
    flags = (*FLAGS, *_target_flags(), *words[len(command) :])
    target = folder / f"kernels-{_digest(command, flags)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        source, library = Path(work) / "all.cpp", Path(work) / "all.so"
        source.write_text("".join(f'#include "{path}"\n' for path in SOURCES), encoding="utf-8")
        _run([*command, *flags, str(source), "-o", str(library)])
        # A name that outlives a power cut, over bytes that did not, would end every process that loads it.
        with library.open("rb") as file:
            os.fsync(file.fileno())
        # Whoever comes second puts the same bytes in the same place.
        os.replace(library, target)
    return target


def begin() -> None:
    """Compile on another thread, so that it is done when an engine asks; what fails is told when that asks again."""

    def compile_quietly() -> None:
        with contextlib.suppress(OSError, RuntimeError, subprocess.SubprocessError):
            build(cache_folder())

    threading.Thread(target=compile_quietly, name="compile-kernels", daemon=True).start()


def _compiler() -> str:
    for name in COMPILERS:
        if shutil.which(name):
            return name
    raise RuntimeError(f"there is no C++ compiler ({', '.join(COMPILERS)})")


def _target_flags() -> tuple[str, ...]:
    if platform.machine() in ("aarch64", "arm64"):
        return ("-mcpu=native",)
    # Compilers keep to half of the widest vectors, for the sake of processors that are slower with them.
    return ("-march=native", "-mprefer-vector-width=512")


def _digest(command: Sequence[str], flags: Sequence[str]) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    described = [version, *flags, _processor(), *(path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES))]
    return hashlib.sha256("\0".join(described).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what -march=native depends on: a cache folder may be shared by unequal machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))}))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        # Before an error stands in which file it is, and what that was included from.
        reason = next((line for line in lines if "error" in line.lower()), lines[0])
        raise RuntimeError(f"{command[0]} failed: {reason}")
