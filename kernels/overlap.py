"""Kernels that begin while the one before them ends: a decode step is hundreds of short ones.

A GPU that can (compute capability 9.0 and above) starts a kernel's programs as soon as all programs of the one before
have said so, which is the first thing that they do. Before that one has ended as a whole nothing is written, and only
what the step began with is read, weights or keys of earlier tokens: memory is busy while nothing else could be done.
Where programs wait before they say so, what they have waited for may be read as well.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import architecture

IS_WANTED = True
"""`loadtest.gpu` has parts without."""


def overlap() -> dict[str, Any]:
    """Return how a kernel that begins with `take_turn` is launched."""
    name = architecture.current()
    can = not triton.knobs.runtime.interpret
    if IS_WANTED and can and name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def let_begin(OVERLAPS: tl.constexpr):
    """Let the next kernel begin."""
    if OVERLAPS:
        gdc_launch_dependents()


@triton.jit
def wait(OVERLAPS: tl.constexpr):
    """Wait until the kernel before has ended, and with it all before that."""
    if OVERLAPS:
        gdc_wait()


@triton.jit
def take_turn(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, and wait for the one before: before anything else."""
    let_begin(OVERLAPS)
    wait(OVERLAPS)
