"""Compiles every GPU kernel for GPUs that need not be present, and reports the resources that each one uses.

    python -m loadtest.gpu.ahead_of_time            # usual targets; exit status 1 if there is a complaint on a kernel
    python -m loadtest.gpu.ahead_of_time sm_90
    python -m loadtest.gpu.ahead_of_time --every 4  # a quarter of each kernel's launches, another one for each target

They are recorded from starts of the engine on tensors without data, so there is no list that can go stale. Needs
Triton, but no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget

from kernels.recording import Launch
from kernels.triton_cache import compile_launch
from loadtest.gpu.early_touches import early_touch
from loadtest.gpu.launches import all_launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU to compile for.

    Attributes:
        shared_bytes: limit of shared memory per program.
    """

    backend: str
    arch: int | str
    warp_size: int
    shared_bytes: int


TARGETS = {
    "sm_80": Target(backend="cuda", arch=80, warp_size=32, shared_bytes=163 * 1024),
    "sm_90": Target(backend="cuda", arch=90, warp_size=32, shared_bytes=227 * 1024),
    "sm_100": Target(backend="cuda", arch=100, warp_size=32, shared_bytes=227 * 1024),
    "gfx942": Target(backend="hip", arch="gfx942", warp_size=64, shared_bytes=64 * 1024),
    "sm_89": Target(backend="cuda", arch=89, warp_size=32, shared_bytes=99 * 1024),
    "sm_120": Target(backend="cuda", arch=120, warp_size=32, shared_bytes=99 * 1024),
}
MAX_SHARED_STORES = 160
"""Most vectors that each thread of a program may write to shared memory, loops counted once; the usual is below 50. A
layout in which every thread has the whole of a tensor takes hundreds to leave.
"""
USUAL_TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
"""Those for which there is to be no complaint; the others are desktop GPUs, on which a few kernels spill."""
_VECTOR_STORE = re.compile(r"\bst\.shared\.v4\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources that one program of a compiled kernel uses.

    Attributes:
        complaint: why they are too many, or what else the compiler did that is wrong; None if nothing.
    """

    target: str
    title: str
    num_registers: int
    spill_bytes: int
    shared_bytes: int
    complaint: str | None


def compile_for(name: str, launch: Launch) -> Usage:
    """Compile one launch for a target in `TARGETS`.

    Raises:
        Exception: whatever Triton raises for a kernel that does not compile.
    """
    target = TARGETS[name]
    compiled = compile_launch(launch, GPUTarget(target.backend, target.arch, target.warp_size))
    if target.backend == "cuda":
        num_registers, spill_bytes = _resources(compiled.asm["cubin"])
    else:
        num_registers, spill_bytes = _amd_resources(compiled.asm["amdgcn"])
    shared_bytes = int(compiled.metadata.shared)
    ptx = compiled.asm.get("ptx", "")
    complaint = None
    if re.search(r"^\s*trap;", ptx, re.MULTILINE):
        complaint = "the compiler has put a trap in its place"
    elif touch := early_touch(ptx):
        complaint = f"it does not wait for the preceding kernel before {touch}"
    elif shared_bytes > target.shared_bytes:
        complaint = f"{shared_bytes} bytes of shared memory, {target.shared_bytes} are there"
    elif (num_stores := len(_VECTOR_STORE.findall(ptx))) > MAX_SHARED_STORES:
        complaint = f"each thread writes {num_stores} vectors to shared memory"
    elif spill_bytes:
        complaint = f"{spill_bytes} bytes of registers spilled"
    return Usage(
        target=name,
        title=launch.title,
        num_registers=num_registers,
        spill_bytes=spill_bytes,
        shared_bytes=shared_bytes,
        complaint=complaint,
    )


def compile_all(jobs: Sequence[tuple[str, Launch]], num_processes: int = 2) -> list[Usage]:
    """Compile launches for their targets in worker processes, because the compiler does not release its memory."""
    # Spawned, because torch's threads do not survive a fork.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_for, *zip(*jobs, strict=True)))


def sample(launches: Sequence[Launch], every: int, start: int = 0) -> Iterator[Launch]:
    """Yield one of `every` launches of each kernel, and at least one, from number `start` on."""
    by_kernel: dict[str, list[Launch]] = {}
    for launch in launches:
        by_kernel.setdefault(launch.kernel, []).append(launch)
    for found in by_kernel.values():
        yield from found[start % min(every, len(found)) :: every]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers per thread and bytes spilled, as cuobjdump reads them from a binary."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        run = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    registers, stack = re.search(r"REG:(\d+)", run.stdout), re.search(r"STACK:(\d+)", run.stdout)
    assert registers is not None
    assert stack is not None
    return int(registers[1]), int(stack[1])


def _amd_resources(assembly: str) -> tuple[int, int]:
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    spilled = re.search(r"\.vgpr_spill_count:\s+(\d+)", assembly)
    assert registers is not None
    assert spilled is not None
    return int(registers[1]), 4 * int(spilled[1])


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile, print the table, and return 1 if there is a complaint about any kernel."""
    parser = argparse.ArgumentParser(description="Compile the GPU kernels for GPUs that are not here.")
    names = f"of {', '.join(TARGETS)} ({', '.join(USUAL_TARGETS)})"
    parser.add_argument("targets", nargs="*", default=list(USUAL_TARGETS), help=names)
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compile one of N launches of a kernel (1)")
    options = parser.parse_args(arguments)
    jobs = [
        (target, launch)
        for place, target in enumerate(options.targets)
        for launch in sample(all_launches(target), options.every, start=place)
    ]
    usages = compile_all(jobs)
    write = partial(print, file=sys.stdout)
    write(f"{'target':8} {'regs':>4} {'spill':>6} {'shared':>7}  kernel")
    for usage in usages:
        mark = f"   <- {usage.complaint}" if usage.complaint else ""
        write(
            f"{usage.target:8} {usage.num_registers:4} {usage.spill_bytes:6} {usage.shared_bytes:7}  "
            f"{usage.title}{mark}"
        )
    return int(any(usage.complaint for usage in usages))


if __name__ == "__main__":
    sys.exit(main())
