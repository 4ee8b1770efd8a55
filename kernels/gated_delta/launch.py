"""`kernels.gated_delta.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels import architecture
from kernels.gated_delta.decode_kernel import gated_delta_decode_kernel
from kernels.gated_delta.prefill_kernel import gated_delta_chunk_kernel, gated_delta_scan_kernel
from kernels.gated_delta.reference import EPS
from kernels.overlap import overlap
from kernels.state_rows import StateRows, token_stride

BLOCK = 32
"""Dimensions at a time, where all tokens of a chunk are in registers."""
COLUMNS = 32
"""Columns of a head's state for each program; in chunks half as many where keys or numbers are wide."""


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    """Return o [rows, tokens, heads, value_dim], contiguous, in the dtype of `v`, and update the states in place.

    Args:
        q, k: [rows, tokens, key_heads, key_dim], one stride between all tokens, which are contiguous; key_dim up to
            256, and `key_heads` divides `heads`.
        v: [rows, tokens, heads, value_dim], likewise.
        g, beta: [rows, tokens, heads], float32 and contiguous.
        states: float32 [rows, heads, key_dim, value_dim], contiguous.
        rows: which of `states`, then [any, heads, key_dim, value_dim], are the rows'; only for one token.
    """
    (num_rows, tokens, _, key_dim), (heads, value_dim) = k.shape, v.shape[2:]
    if tokens > 1:
        assert rows is None, "rows of several tokens have states of their own"
        return _in_chunks(q, k, v, g, beta, states)
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    gated_delta_decode_kernel[(triton.cdiv(value_dim, COLUMNS), heads, num_rows)](
        *(q, k, v, g, beta, states, *(rows or (g, g)), out, *map(token_stride, (q, k, v)), EPS, key_dim**-0.5),
        **_sizes(k, v),
        IS_HELD=rows is not None,
        BLOCK_K=_padded(key_dim),
        BLOCK_V=COLUMNS,
        num_warps=4,
        **overlap(),
    )
    return out


def _in_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, states: torch.Tensor
) -> torch.Tensor:
    (num_rows, tokens, _, key_dim), (heads, value_dim) = k.shape, v.shape[2:]
    is_wide, is_amd = v.dtype is torch.float32, architecture.current().startswith("gfx")
    # What a chunk needs has to fit into registers.
    levels = 4 if is_wide else 5 if key_dim > 128 else 6
    columns = COLUMNS // 2 if is_wide or key_dim > 128 else COLUMNS
    chunk = 1 << levels
    # The inverse is rounded to the dtype of `v` in the end: tf32 hardly adds to what bfloat16 loses. What float16 loses
    # becomes 1.4 to 4 times as much, which is still less.
    sizes = {**_sizes(k, v), "CHUNK": chunk, "PRECISION": "ieee" if is_wide or is_amd else "tf32"}
    strides = [token_stride(x) for x in (q, k, v)]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    u, w, p = (out.new_empty(num_rows, tokens, heads, width) for width in (value_dim, key_dim, chunk))
    fades = torch.empty(num_rows, tokens, heads, 3, dtype=torch.float32, device=v.device)
    gated_delta_chunk_kernel[(triton.cdiv(tokens, chunk), heads, num_rows)](
        *(q, k, v, g, beta, u, w, p, fades, tokens, *strides, EPS, key_dim**-0.5),
        **sizes,
        LEVELS=levels,
        BLOCK=BLOCK,
        num_warps=4 if is_amd else 8,
        **overlap(),
    )
    gated_delta_scan_kernel[(triton.cdiv(value_dim, columns), heads, num_rows)](
        *(q, k, u, w, p, fades, states, out, tokens, *strides[:2]),
        **sizes,
        BLOCK_K=_padded(key_dim),
        BLOCK_V=columns,
        num_warps=8 if is_wide else 4,
        num_stages=1 if is_amd else 2,
        **overlap(),
    )
    return out


def _sizes(k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    return {"HEADS": v.shape[2], "KEY_HEADS": k.shape[2], "KEY_DIM": k.shape[3], "VALUE_DIM": v.shape[3]}


def _padded(key_dim: int) -> int:
    return max(16, int(triton.next_power_of_2(key_dim)))
