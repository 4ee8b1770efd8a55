"""`kernels.selective_scan.reference` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch
import triton

from kernels import architecture
from kernels.architecture import PROGRAMS_WANTED
from kernels.overlap import overlap
from kernels.selective_scan.decode_kernel import selective_decode_kernel
from kernels.selective_scan.prefill_kernel import selective_chunks_kernel, selective_scan_kernel
from kernels.state_rows import StateRows, token_stride

STEP_NUMBERS = 2048
"""Numbers of a state for each program, where there is one token: four loads of each thread."""
MOST_HEADS = 8
"""Heads for which one program computes a chunk, and reads what they share once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanCut:
    """The tiling of the launches for many tokens.

    Attributes:
        chunk: tokens of a chunk.
        block: dimensions at a time where no state is needed.
        rows: of a head's state, for each program.
        num_warps, num_stages: Triton's options where states go from chunk to chunk.
    """

    chunk: int = 64
    block: int = 64
    rows: int
    num_warps: int
    num_stages: int


def chunk_cut(state_dim: int, element_bytes: int) -> ScanCut:
    """Return the tiling for states of up to `state_dim` columns, 128 or 256.

    On each architecture chosen so that no register spills, except in float32 with more than 128 columns, and where
    there is room, so that two programs share a multiprocessor; not measured yet.
    """
    gpu, is_wide = architecture.current(), state_dim > 128
    if gpu.startswith("gfx"):
        if element_bytes == 4:
            return ScanCut(chunk=32, block=32, rows=16, num_warps=4, num_stages=1)
        return ScanCut(rows=16, num_warps=4, num_stages=1 if is_wide else 2)
    if element_bytes == 4:
        return ScanCut(chunk=16, block=32, rows=16, num_warps=8, num_stages=1)
    if gpu in ("sm_90", "sm_100", "sm_103"):
        return ScanCut(rows=32, num_warps=8 if is_wide else 4, num_stages=3)
    if is_wide:
        return ScanCut(rows=16, num_warps=8, num_stages=2)
    return ScanCut(rows=32, num_warps=4, num_stages=3)


def precision_of(dtype: torch.dtype) -> str:
    """Return how the products of this dtype are computed, as Triton calls it."""
    # Three products of tf32, where there is such a thing, are as exact as one in float32.
    has_tf32 = dtype is torch.float32 and not architecture.current().startswith("gfx")
    return "tf32x3" if has_tf32 else "ieee"


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    """Return y [rows, tokens, heads, head_dim], contiguous, in the dtype of `x`, and update the states in place.

    Args:
        x: shaped like y; one stride between all tokens, which are contiguous.
        dt: [rows, tokens, heads], float32 and contiguous: biased, made positive and clamped.
        a: [heads], float32, negative.
        b, c: [rows, tokens, groups, state_dim], each with one stride as `x`; state_dim up to 256, and `groups` divides
            `heads`.
        d: [heads], float32; None for zeros.
        states: float32 [rows, heads, head_dim, state_dim], contiguous.
        rows: which of `states`, then [any, heads, head_dim, state_dim], are the rows'; only for one token.
    """
    if x.shape[1] > 1:
        assert rows is None, "rows of several tokens have states of their own"
        return _in_chunks(x, dt, a, b, c, d, states)
    (num_rows, _, heads, head_dim), state_dim = x.shape, b.shape[3]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block_n = triton.next_power_of_2(state_dim)
    block_p = min(triton.next_power_of_2(head_dim), max(1, STEP_NUMBERS // block_n))
    selective_decode_kernel[(triton.cdiv(head_dim, block_p), heads, num_rows)](
        *(x, dt, a, b, c, a if d is None else d, states, *(rows or (dt, dt)), y),
        *(token_stride(part) for part in (x, b, c)),
        **_sizes(x, b),
        HAS_D=d is not None,
        IS_HELD=rows is not None,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        num_warps=4,
        **overlap(),
    )
    return y


def _in_chunks(
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    states: torch.Tensor,
) -> torch.Tensor:
    """Return `selective_scan` of several tokens."""
    num_rows, tokens, heads, head_dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    fades, gains = torch.empty(2, num_rows, heads, tokens, dtype=torch.float32, device=x.device)
    strides = [token_stride(part) for part in (x, b, c)]
    block_n = max(16, triton.next_power_of_2(b.shape[3]))
    cut = chunk_cut(block_n, x.element_size())
    options = {**_sizes(x, b), "CHUNK": cut.chunk, "PRECISION": precision_of(x.dtype), **overlap()}
    num_chunks = triton.cdiv(tokens, cut.chunk)
    num_heads = _heads_at_once(heads // b.shape[2], num_chunks * heads * num_rows)
    selective_chunks_kernel[(num_chunks, heads // num_heads, num_rows)](
        *(x, dt, a, b, c, a if d is None else d, y, fades, gains, tokens, num_heads, *strides),
        **options,
        HAS_D=d is not None,
        BLOCK=cut.block,
        num_warps=4,
    )
    selective_scan_kernel[(triton.cdiv(head_dim, cut.rows), heads, num_rows)](
        *(x, b, c, states, y, fades, gains, tokens, *strides),
        **options,
        BLOCK_P=cut.rows,
        BLOCK_N=block_n,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
    )
    return y


def _sizes(x: torch.Tensor, b: torch.Tensor) -> dict[str, int]:
    """Return the compile-time constants of all kernels."""
    return {"HEADS": x.shape[2], "GROUPS": b.shape[2], "HEAD_DIM": x.shape[3], "STATE_DIM": b.shape[3]}


def _heads_at_once(share: int, num_parts: int) -> int:
    """Return how many of the `share` heads of a group a program takes of `num_parts` in all: enough programs remain."""
    at_once = gcd(share, MOST_HEADS)
    while at_once > 1 and num_parts // at_once < PROGRAMS_WANTED:
        at_once //= 2
    return at_once
