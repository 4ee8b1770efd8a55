"""Compiles the CPU kernels once per machine, with the machine's own compiler.

Does not import torch, so that a server can start compiling immediately.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from itertools import takewhile
from pathlib import Path

_FOLDER = Path(__file__).parent
SOURCES = (_FOLDER / "program.cpp", *sorted(_FOLDER.glob("*/cpu.cpp")))
HEADERS = tuple(sorted(_FOLDER.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math: the engine checks for NaN and infinity, so these must propagate.
FLAGS = ("-std=c++20", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fPIC", "-shared", "-pthread")
COMPILE_TIMEOUT_S = 900
"""A compiler that hangs is given up; one takes half a minute of a core, which others may need as well at a start."""


def cache_folder() -> Path:
    """Return the folder of compiled kernels.

    Raises:
        RuntimeError: the user has no home directory.
    """
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "antiphon"


def build(folder: Path, compiler: str | None = None) -> Path:
    """Return the library in `folder`, compiling it if it does not exist.

    Args:
        compiler: command with optional flags, such as "ccache g++ -g"; None for that in `CXX`, or else the first
            compiler found.

    Raises:
        RuntimeError: no compiler was found, or compilation failed.
        OSError: the compiler does not exist, or the folder is not writable.
        subprocess.SubprocessError: the compiler hangs or is broken.
    """
    words = (compiler or os.environ.get("CXX", "")).split() or [_compiler()]
    command = list(takewhile(lambda word: not word.startswith("-"), words))
    # The caller's flags come last: the last of conflicting flags wins.
    flags = (*FLAGS, *_target_flags(), *words[len(command) :])
    target = folder / f"kernels-{_digest(command, flags)}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder), tempfile.TemporaryDirectory(dir=folder) as work:
        if target.exists():
            return target
        source, library = Path(work) / "all.cpp", Path(work) / "all.so"
        source.write_text("".join(f'#include "{path}"\n' for path in SOURCES), encoding="utf-8")
        _run([*command, *flags, str(source), "-o", str(library)])
        # If the name survived a power failure but the bytes did not, every process that loads it would crash.
        with library.open("rb") as file:
            os.fsync(file.fileno())
        # A concurrent build, where files cannot be locked, replaces it with the same bytes.
        os.replace(library, target)
    return target


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process compiles for this folder: the server and each replica that starts would at once."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Some network file systems have no locks.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def begin() -> None:
    """Compile on a background thread, ahead of an engine's need. Errors are reported when the engine builds again."""

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
    # By default compilers use only half of the widest vectors, because some processors are slower with the full width.
    return ("-march=native", "-mprefer-vector-width=512")


def _digest(command: Sequence[str], flags: Sequence[str]) -> str:
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=30, check=True).stdout
    described = [version, *flags, _processor(), *(path.read_text(encoding="utf-8") for path in (*HEADERS, *SOURCES))]
    return hashlib.sha256("\0".join(described).encode()).hexdigest()[:16]


def _processor() -> str:
    """Return what the target flags depend on, because machines with different processors may share a cache folder."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    # On ARM, the lines of "CPU" tell the model.
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU "))}))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        # The error follows lines that name the file and its includers.
        reason = next((line for line in lines if "error" in line.lower()), lines[0])
        raise RuntimeError(f"{command[0]} failed: {reason}")
