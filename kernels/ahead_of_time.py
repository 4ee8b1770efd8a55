"""Compiles every GPU kernel, as it is launched, for GPUs that are not here, and says what each takes of them.

    python -m kernels.ahead_of_time            # all targets; status 1 where a kernel spills or does not fit
    python -m kernels.ahead_of_time sm_90

What is compiled is recorded from the launches themselves, on tensors without memory: no list of configurations can go
stale. Needs Triton, and no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TYPE_BY_DTYPE = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}
FLOATS = ("*fp32", "*fp16", "*bf16", "*i8", "*fp8e4nv", "*fp8e4b8")
"""Of the types those that a kernel computes with, which its title names."""
ALIGNMENT = 16
"""What Triton knows of addresses and numbers: whether this divides them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A GPU to compile for.

    Attributes:
        shared_bytes: what one program may have of shared memory.
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
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One specialisation of a kernel, by names, so that other processes can be told of it.

    Attributes:
        module, kernel: where the function is found.
        signature: Triton's type of each argument, "constexpr" for those compiled in.
        constants: of the arguments compiled in.
        aligned: arguments that `ALIGNMENT` divides.
        options: `num_warps` and `num_stages`, where the launch sets them.
    """

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def title(self) -> str:
        """The kernel with the constants that tell its specialisations apart."""
        types = sorted({kind[1:] for _, kind in self.signature if kind in FLOATS})
        numbers = " ".join(f"{name.lower()}={value}" for name, value in self.constants if name.isupper())
        return f"{self.kernel.removesuffix('_kernel')} {'/'.join(types)} {numbers}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What one program of a compiled kernel takes; `complaint` is why it may not, or None."""

    target: str
    title: str
    num_registers: int
    spill_bytes: int
    shared_bytes: int
    complaint: str | None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches of kernels instead of running them; each specialisation once."""
    launches: list[Launch] = []
    run = triton.JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch = _launch_of(kernel, args, named)
        if launch not in launches:
            launches.append(launch)

    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = run


def compile_for(name: str, launch: Launch) -> Usage:
    """Compile one launch for the target of a name.

    Raises:
        Exception: whatever Triton says of a kernel that does not compile.
    """
    target = TARGETS[name]
    kernel = getattr(import_module(launch.module), launch.kernel)
    places = {parameter: index for index, parameter in enumerate(kernel.arg_names)}
    source = ASTSource(
        fn=kernel,
        signature=dict(launch.signature),
        constexprs=dict(launch.constants),
        attrs={(places[parameter],): [["tt.divisibility", ALIGNMENT]] for parameter in launch.aligned},
    )
    compiled = triton.compile(
        source, target=GPUTarget(target.backend, target.arch, target.warp_size), options=dict(launch.options)
    )
    if target.backend == "cuda":
        num_registers, spill_bytes = _resources(compiled.asm["cubin"])
    else:
        num_registers, spill_bytes = _amd_resources(compiled.asm["amdgcn"])
    shared_bytes = int(compiled.metadata.shared)
    complaint = None
    if shared_bytes > target.shared_bytes:
        complaint = f"{shared_bytes} bytes of shared memory, {target.shared_bytes} are there"
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
    """Compile launches for their targets, in processes of their own: the compiler holds on to its memory."""
    # Not forked: torch's threads do not come along.
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        return list(pool.map(compile_for, *zip(*jobs, strict=True)))


def _launch_of(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: value for name, value in named.items() if name in kernel.arg_names
    }
    signature, constants, aligned = [], [], []
    for parameter in kernel.params:
        value = values[parameter.name]
        # Triton compiles a 1 in, as it does what is declared so.
        is_free = parameter.do_not_specialize
        if parameter.is_constexpr or (isinstance(value, int) and value == 1 and not is_free):
            signature.append((parameter.name, "constexpr"))
            constants.append((parameter.name, value))
            continue
        if isinstance(value, torch.Tensor):
            kind, number = TYPE_BY_DTYPE[value.dtype], value.storage_offset() * value.element_size()
        elif isinstance(value, int):
            kind, number = "i32" if abs(value) < 1 << 31 else "i64", value
        else:
            kind, number = "fp32", 1
        signature.append((parameter.name, kind))
        if number % ALIGNMENT == 0 and not is_free:
            aligned.append(parameter.name)
    options = [(name, named[name]) for name in ("num_warps", "num_stages") if name in named]
    return Launch(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        signature=tuple(signature),
        constants=tuple(constants),
        aligned=tuple(aligned),
        options=tuple(options),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return registers a thread and bytes that they spill, as NVIDIA's tool reads them off a binary."""
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
    """Compile, print the table, and return 1 where a kernel spills or does not fit."""
    from kernels.launches import all_launches

    parser = argparse.ArgumentParser(description="Compile the GPU kernels for GPUs that are not here.")
    parser.add_argument("targets", nargs="*", default=list(TARGETS), help=f"of {', '.join(TARGETS)} (all)")
    options = parser.parse_args(arguments)
    usages = compile_all([(target, launch) for target in options.targets for launch in all_launches(target)])
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
