"""Programmatic dependent launch: overlaps the start of a kernel with the end of the preceding one.

A decode step is hundreds of short kernels. GPUs of compute capability 9.0 and above start a kernel's programs as soon
as all programs of the preceding kernel have signaled, which they do first of all. Until that kernel has finished,
nothing may be written, and only data from before the step may be read, such as weights or keys of earlier tokens; so
memory stays busy. If the programs of the preceding kernel wait before they signal, what they waited for is readable
too.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import architecture

IS_WANTED = True
"""`loadtest.gpu` turns it off for comparison."""
CAN_WAIT = not triton.knobs.runtime.interpret
"""Whether kernels can wait for one another; the interpreter cannot compute these instructions."""


def overlap() -> dict[str, Any]:
    """Return the launch options of a kernel that uses `let_begin` and `wait`, or `take_turn`."""
    name = architecture.current()
    if IS_WANTED and CAN_WAIT and name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def let_begin(OVERLAPS: tl.constexpr):
    """Signal that the next kernel may start."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait until the preceding kernel, and with it all earlier ones, has finished."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def take_turn(OVERLAPS: tl.constexpr):
    """Let the next kernel start and wait for the preceding one; call this first."""
    let_begin(OVERLAPS)
    wait(OVERLAPS)
