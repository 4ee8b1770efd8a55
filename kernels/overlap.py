"""Kernels that begin while the one before them ends: a decode step is hundreds of short ones.

A GPU that can (compute capability 9.0 and above) starts a kernel's programs as soon as all programs of the one before
have said so, which is the first thing that they do; nothing is read or written before that one has ended as a whole.
Off until it is measured: `loadtest.gpu` has parts with it and without.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels import architecture

IS_WANTED = False


def overlap() -> dict[str, Any]:
    """Return how a kernel that begins with `take_turn` is launched."""
    name = architecture.current()
    if IS_WANTED and name.startswith("sm_") and int(name.removeprefix("sm_")) >= 90:
        return {"OVERLAPS": True, "launch_pdl": True}
    return {"OVERLAPS": False}


@triton.jit
def take_turn(OVERLAPS: tl.constexpr):
    """Let the next kernel begin, and wait for the one before: before anything else."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()
