"""Records kernel launches instead of running them, so that they can be compiled without the GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton

TYPE_BY_DTYPE = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.bool: "*i1",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e4m3fnuz: "*fp8e4b8",
}
FLOATS = ("*fp32", "*fp16", "*bf16", "*i8", "*fp8e4nv", "*fp8e4b8")
"""The types that a kernel computes with, which its title lists."""
ALIGNMENT = 16
"""Triton specializes addresses and integers by whether they are multiples of this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One specialization of a kernel, identified by names so that it can be sent to other processes.

    Attributes:
        module, kernel: the module and name of the kernel function.
        signature: Triton's type of each argument, "constexpr" for those compiled in.
        constants: values of the arguments compiled in.
        aligned: arguments that are multiples of `ALIGNMENT`.
        options: `num_warps`, `num_stages`, `maxnreg` (see `kernels.architecture`) and `launch_pdl` (see
            `kernels.overlap`), if the launch sets them.
    """

    module: str
    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, int], ...]

    @property
    def title(self) -> str:
        """The kernel's name with the types and constants that distinguish its specializations."""
        types = sorted({kind[1:] for _, kind in self.signature if kind in FLOATS})
        numbers = " ".join(f"{name.lower()}={value}" for name, value in self.constants if name.isupper())
        return f"{self.kernel.removesuffix('_kernel')} {'/'.join(types)} {numbers}"


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect kernel launches instead of running them, each specialization once."""
    launches: list[Launch] = []
    known: set[Launch] = set()
    run = triton.JITFunction.run

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launch = _launch_of(kernel, args, named)
        if launch not in known:
            known.add(launch)
            launches.append(launch)

    triton.JITFunction.run = record
    try:
        yield launches
    finally:
        triton.JITFunction.run = run


def _launch_of(kernel: Any, args: Sequence[Any], named: dict[str, Any]) -> Launch:
    values = dict(zip(kernel.arg_names, args, strict=False)) | {
        name: value for name, value in named.items() if name in kernel.arg_names
    }
    signature, constants, aligned = [], [], []
    for parameter in kernel.params:
        value = values[parameter.name]
        # Triton compiles in an argument of 1, as it does a constexpr.
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
    options = [(name, named[name]) for name in ("num_warps", "num_stages", "maxnreg", "launch_pdl") if name in named]
    return Launch(
        module=kernel.fn.__module__,
        kernel=kernel.fn.__name__,
        signature=tuple(signature),
        constants=tuple(constants),
        aligned=tuple(aligned),
        options=tuple(options),
    )
