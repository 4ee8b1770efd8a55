"""`kernels.streamed_linear.reference` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.architecture import PROGRAMS_WANTED, current
from kernels.overlap import overlap
from kernels.streamed_linear.kernel import from_int4_kernel, streamed_linear_kernel
from kernels.streamed_linear.layout import BLOCK
from kernels.streamed_linear.reference import Int4Matrix
from kernels.streamed_linear.row_kernel import row_kernel

BLOCK_N, BLOCK_K, MAX_BLOCK_M = 64, 64, 64
MAX_SPLITS = 8
WHOLE_TILES, WHOLE_DEPTH = 64, 4096
"""From so many tiles on no depth up to this is cut: parts take longer to join than they save (measured on an H200)."""
MAX_ROWS = 2
"""Of `row_linear`; with more it would compute for longer than it reads."""
BITS_BY_DTYPE = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""The bits of 128 and of 1024: what the last four bits of their mantissas are worth is 8, 4, 2 and 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one launch is cut: outputs and inputs of a tile, programs that share the depth, and how Triton runs it."""

    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCut:
    """How one launch for few rows is cut: outputs and inputs of a tile, and how Triton runs it."""

    block_n: int
    block_k: int
    num_warps: int


def counters(width: int, max_rows: int, device: torch.device) -> torch.Tensor:
    """Return what products of `width` outputs and `max_rows` rows at most count by: int32, zeros again after each."""
    return torch.zeros(triton.cdiv(width, BLOCK_N) * triton.cdiv(max_rows, 16), dtype=torch.int32, device=device)


def streamed_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Int4Matrix,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    cut: Cut | None = None,
) -> torch.Tensor:
    """Multiply `x` [rows, in], contiguous, by a matrix [out, in] and add `bias` [out].

    Args:
        arrived: `counters` that do for it; no other product may use them meanwhile.
        cut: for who looks for a better one, and brings counters that do for that.

    Returns:
        [rows, out] in the type of `x`.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    block_m = min(MAX_BLOCK_M, max(16, triton.next_power_of_2(rows)))
    cut = cut or usual_cut(x, width, block_m, is_int4=isinstance(weight, Int4Matrix))
    splits = cut.num_splits
    parts = torch.empty(splits, rows, width, dtype=torch.float32, device=x.device) if splits > 1 else out
    held = (weight.held, weight.units) if isinstance(weight, Int4Matrix) else (weight, weight)
    streamed_linear_kernel[(triton.cdiv(width, cut.block_n), triton.cdiv(rows, block_m), splits)](
        x,
        *held,
        out if bias is None else bias,
        parts,
        arrived,
        out,
        rows,
        width,
        depth,
        GROUP=weight.group if isinstance(weight, Int4Matrix) else 0,
        HAS_BIAS=bias is not None,
        BITS=BITS_BY_DTYPE.get(x.dtype, 0),
        NUM_SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **overlap(),
    )
    return out


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_gated: bool = False,
    cut: RowCut | None = None,
) -> torch.Tensor:
    """Multiply `x` [rows, in], contiguous and of few rows, by a matrix [out, in] and add `bias` [out].

    Args:
        is_gated: whether the outputs are [gate | up], to be joined as `kernels.gated_activation` defines it.
        cut: for who looks for a better one.

    Returns:
        [rows, out], or half as many columns, in the type of `x`.
    """
    (rows, depth), width = x.shape, weight.shape[0] // (2 if is_gated else 1)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        cut = cut or usual_row_cut(depth, is_gated=is_gated)
        row_kernel[(triton.cdiv(width, cut.block_n),)](
            x,
            weight,
            out if bias is None else bias,
            out,
            rows,
            width,
            DEPTH=depth,
            HAS_BIAS=bias is not None,
            IS_GATED=is_gated,
            BLOCK_M=triton.next_power_of_2(rows),
            BLOCK_N=cut.block_n,
            BLOCK_K=cut.block_k,
            num_warps=cut.num_warps,
            **overlap(),
        )
    return out


def usual_row_cut(depth: int, *, is_gated: bool) -> RowCut:
    """Return how one row is multiplied, as was measured to be the fastest within all layers of a model (H200).

    What lies between one tile and two is read as one: the fewer times a program waits for memory, the better.
    """
    most = 1024 if is_gated else 4096 if 2048 < depth < 4096 else 2048
    return RowCut(block_n=2, block_k=min(most, triton.next_power_of_2(depth)), num_warps=4)


def usual_cut(x: torch.Tensor, width: int, block_m: int, *, is_int4: bool) -> Cut:
    """Return how `x` [rows, in] is multiplied to `width` outputs, by tiles of `block_m` rows."""
    (rows, depth), block_k = x.shape, BLOCK if is_int4 else BLOCK_K
    num_tiles = triton.cdiv(width, BLOCK_N) * triton.cdiv(rows, block_m)
    has_room = x.element_size() == 2 and not current().startswith("gfx")
    splits = num_splits(num_tiles, triton.cdiv(depth, block_k))
    if has_room and not is_int4 and num_tiles >= WHOLE_TILES and depth <= WHOLE_DEPTH:
        block_k, splits = 2 * BLOCK_K, 1
    return Cut(block_n=BLOCK_N, block_k=block_k, num_splits=splits, num_warps=4, num_stages=4 if has_room else 2)


def from_int4(matrix: Int4Matrix) -> torch.Tensor:
    """Return the weights [out, in] that a matrix stands for, in the type of its scales."""
    width, depth = matrix.shape
    out = torch.empty(width, depth, dtype=matrix.dtype, device=matrix.held.device)
    from_int4_kernel[(triton.cdiv(width, BLOCK_N), depth // BLOCK)](
        matrix.held,
        matrix.units,
        out,
        width,
        depth,
        GROUP=matrix.group,
        BITS=BITS_BY_DTYPE[out.dtype],
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )
    return out


def num_splits(tiles: int, steps: int) -> int:
    """Return among how many programs the depth of `steps` is cut: more where there are few tiles, a power of two."""
    wanted = triton.next_power_of_2(triton.cdiv(2 * PROGRAMS_WANTED, tiles))
    return int(min(MAX_SPLITS, wanted, triton.next_power_of_2(steps)))
