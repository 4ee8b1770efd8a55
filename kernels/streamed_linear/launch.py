"""`kernels.streamed_linear.reference` on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from kernels.architecture import PROGRAMS_WANTED, bounded, current, max_registers, shared_bytes
from kernels.overlap import overlap
from kernels.row_quantization.launch import Rounded, quantize_rows
from kernels.row_quantization.reference import LIMIT_BY_DTYPE
from kernels.streamed_linear.kernel import from_int4_kernel, streamed_linear_kernel
from kernels.streamed_linear.layout import BLOCK
from kernels.streamed_linear.reference import FP8, Fp8Matrix, Int4Matrix, Matrix
from kernels.streamed_linear.row_kernel import row_kernel

BLOCK_N, BLOCK_K, MAX_BLOCK_M = 64, 64, 64
MAX_SPLITS = 8
WHOLE_TILES, WHOLE_DEPTH = 64, 4096
"""With so many tiles, 16-bit weights up to this depth are not split: summing parts would take longer (H200)."""
MAX_FP8_BLOCK_M, MAX_STAGES = 128, 8
MAX_SWEPT_ROWS = 16
"""Up to this many rows, tilings for unquantized weights were swept on an H200."""
MAX_WIDE_ROWS = 64
"""Maximum rows for wide tiles in `tile_cut`: sums of more rows would not fit into registers."""
MAX_WIDE_INT4_ROWS = 32
"""The same with int4 weights, of which each group of inputs has a sum of its own."""
MAX_ROWS = 2
"""Maximum rows for `row_linear`, which would be compute-bound with more."""
MAX_ROW_DEPTH = 4096
"""Maximum inputs of a tile of 16-bit weights in `row_linear`; of FP8 ones, a program with more has fewer outputs."""
MAX_FP8_DEPTH, FP8_WARP_DEPTH = 16384, 1024
"""Maximum inputs of a tile of FP8 weights, and inputs for each of its warps, by registers: those of two rows and of
more would spill.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCut:
    """The tiling of one launch: outputs and inputs of a tile, programs that split the depth, and options for Triton."""

    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowCut:
    """The tiling of one `row_linear` launch: outputs and inputs of a tile, and Triton's options."""

    block_n: int
    block_k: int
    num_warps: int


def counters(width: int, max_rows: int, device: torch.device) -> torch.Tensor:
    """Return the counters for products of `width` outputs and up to `max_rows` rows: int32, zero after each launch."""
    return torch.zeros(triton.cdiv(width, BLOCK_N) * triton.cdiv(max_rows, 16), dtype=torch.int32, device=device)


def streamed_linear(
    x: torch.Tensor,
    weight: Matrix,
    bias: torch.Tensor | None,
    arrived: torch.Tensor,
    cut: LinearCut | None = None,
    rounded: Rounded | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `x` [rows, in], contiguous, by a matrix [out, in] and add `bias` [out].

    Args:
        arrived: `counters` of sufficient size, not shared with a concurrent product.
        cut: overrides the tiling, for tuning; `arrived` must suffice for it.
        rounded: for FP8 weights, the rows of `x` already quantized to FP8; None to quantize them here.
        out: receives the result, in any dtype; None for new memory.

    Returns:
        [rows, out] in the dtype of `x`, or `out`.
    """
    (rows, depth), width = x.shape, weight.shape[0]
    is_fp8, is_int4 = isinstance(weight, Fp8Matrix), isinstance(weight, Int4Matrix)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    if not rows:
        return out
    block_m = _tile_rows(rows, MAX_FP8_BLOCK_M if is_fp8 else MAX_BLOCK_M)
    if cut is None and (is_int4 or (not is_fp8 and rows <= MAX_SWEPT_ROWS)):
        cut = usual_cut(x, width, block_m, is_int4=is_int4)
    cut = cut or tile_cut(rows, width, depth, 1 if is_fp8 else x.element_size())
    splits = cut.num_splits
    parts = torch.empty(splits, rows, width, dtype=torch.float32, device=x.device) if splits > 1 else out
    inputs = rounded or quantize_rows(x, weight.held.dtype) if isinstance(weight, Fp8Matrix) else (x, x)
    held = (weight, weight) if isinstance(weight, torch.Tensor) else (weight.held, weight.units)
    streamed_linear_kernel[(triton.cdiv(width, cut.block_n), triton.cdiv(rows, block_m), splits)](
        *inputs,
        *held,
        out if bias is None else bias,
        parts,
        arrived,
        out,
        rows,
        width,
        depth,
        GROUP=weight.group if isinstance(weight, Int4Matrix) else 0,
        IS_FP8=is_fp8,
        HAS_BIAS=bias is not None,
        NUM_SPLITS=splits,
        BLOCK_M=block_m,
        BLOCK_N=cut.block_n,
        BLOCK_K=cut.block_k,
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        **bounded(cut.max_registers),
        **overlap(),
    )
    return out


def row_linear(
    x: torch.Tensor,
    weight: torch.Tensor | Fp8Matrix,
    bias: torch.Tensor | None,
    *,
    norm: tuple[torch.Tensor, float] | None = None,
    is_gated: bool = False,
    out: torch.Tensor | None = None,
    is_added: bool = False,
    cut: RowCut | None = None,
) -> torch.Tensor:
    """Multiply `x` [rows, in], contiguous and of at most `MAX_ROWS` rows, by a matrix [out, in] and add `bias` [out].

    FP8 weights are dequantized on the fly; inputs are not quantized.

    Args:
        norm: weight [in] and epsilon of a norm of the rows of `x`, as `kernels.add_rms_norm` defines it; the normed
            inputs are not rounded before the product.
        is_gated: whether the outputs are [gate | up], to which SiLU gating is applied as `kernels.gated_activation`
            defines it.
        out: receives the result, in any dtype; None for new memory.
        is_added: whether the result is added to `out`.
        cut: overrides the tiling, for tuning.

    Returns:
        [rows, out], or half as many columns if gated, in the dtype of `x`; or `out`.
    """
    (rows, depth), width = x.shape, weight.shape[0] // (2 if is_gated else 1)
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device) if out is None else out
    if rows:
        is_fp8 = isinstance(weight, Fp8Matrix)
        cut = cut or usual_row_cut(depth, is_gated=is_gated, is_fp8=is_fp8, has_norm=norm is not None)
        gain, eps = norm or (x, 0.0)
        row_kernel[(triton.cdiv(width, cut.block_n),)](
            x,
            *((weight.held, weight.units) if isinstance(weight, Fp8Matrix) else (weight, weight)),
            out if bias is None else bias,
            gain,
            out,
            rows,
            width,
            eps,
            DEPTH=depth,
            LIMIT=weight.limit if isinstance(weight, Fp8Matrix) else 0,
            HAS_BIAS=bias is not None,
            HAS_NORM=norm is not None,
            IS_GATED=is_gated,
            IS_ADDED=is_added,
            BLOCK_M=triton.next_power_of_2(rows),
            BLOCK_N=cut.block_n,
            BLOCK_K=cut.block_k,
            num_warps=cut.num_warps,
            **overlap(),
        )
    return out


def usual_row_cut(depth: int, *, is_gated: bool, is_fp8: bool, has_norm: bool) -> RowCut:
    """Return the tiling for one row, measured to be the fastest within all layers of a model (H200).

    A depth between one and two tiles is loaded as one: the fewer times a program waits for memory, the better. FP8
    weights have half the bytes, so a whole depth is loaded before the preceding kernel has finished. In a loop, the
    compiler takes the next tile apart into bytes at once, so that each program would wait for it. That has not been
    measured yet, nor have tiles for normed inputs, which leave as many registers free as others do.
    """
    if is_fp8 and depth > MAX_FP8_DEPTH:
        return RowCut(block_n=2 if is_gated else 4, block_k=2048, num_warps=8)
    if is_fp8:
        block_k, block_n = triton.next_power_of_2(depth), 1 if is_gated and depth > MAX_ROW_DEPTH else 2
        return RowCut(block_n=block_n, block_k=block_k, num_warps=max(4, block_k // FP8_WARP_DEPTH))
    if is_gated:
        most = 1024
    elif has_norm:
        most = MAX_ROW_DEPTH if depth <= MAX_ROW_DEPTH else 1024
    else:
        most = MAX_ROW_DEPTH if 2048 < depth < MAX_ROW_DEPTH else 2048
    return RowCut(block_n=2, block_k=min(most, triton.next_power_of_2(depth)), num_warps=4)


def wide_cut(x: torch.Tensor, weight: Matrix) -> LinearCut:
    """Return the tiling of a product of `x` [rows, in] with a matrix [out, in] in tiles of more outputs."""
    (rows, depth), width = x.shape, weight.shape[0]
    if isinstance(weight, Int4Matrix):
        # A program's threads share what a step of its loop takes beside the weights.
        return usual_cut(x, width, _tile_rows(rows, MAX_BLOCK_M), is_int4=True, block_n=2 * BLOCK_N)
    number_bytes = 1 if isinstance(weight, Fp8Matrix) else x.element_size()
    return tile_cut(rows, width, depth, number_bytes, is_wide=True)


def usual_cut(x: torch.Tensor, width: int, block_m: int, *, is_int4: bool, block_n: int = BLOCK_N) -> LinearCut:
    """Return the tiling of a product of `x` [rows, in] with `width` outputs, in tiles of `block_m` rows."""
    (rows, depth), block_k = x.shape, BLOCK if is_int4 else BLOCK_K
    num_tiles = triton.cdiv(width, block_n) * triton.cdiv(rows, block_m)
    has_room = x.element_size() == 2 and not current().startswith("gfx")
    splits = num_splits(num_tiles, triton.cdiv(depth, block_k))
    if has_room and not is_int4 and num_tiles >= WHOLE_TILES and depth <= WHOLE_DEPTH:
        block_k, splits = 2 * BLOCK_K, 1
    return LinearCut(block_n=block_n, block_k=block_k, num_splits=splits, num_warps=4, num_stages=4 if has_room else 2)


def tile_cut(rows: int, width: int, depth: int, number_bytes: int, *, is_wide: bool = False) -> LinearCut:
    """Return the tiling for `rows` rows and weights of `number_bytes` each. Derived by reasoning, not measured yet.

    Every tile reads its inputs again, from an L2 cache that is little faster than memory. With twice as many outputs as
    rows per tile, input traffic is half of the weights', with wide tiles a quarter. If there are fewer tiles than
    multiprocessors, the depth is split until each has a program, but no further, because parts are written and read
    again. A program has as many weights in flight as fit into shared memory, alone or beside another program. Narrow
    tiles of few rows are not split under the same limits in bytes as those of 16-bit weights.
    """
    block_m = _tile_rows(rows, MAX_FP8_BLOCK_M if number_bytes == 1 else MAX_BLOCK_M)
    block_n = BLOCK_N if block_m <= 32 else 2 * BLOCK_N
    if is_wide:
        block_n *= 2
    # At least a cache line, and for FP8 as many inputs as are accumulated at once.
    block_k = (4 if block_n == BLOCK_N else 2) * BLOCK_K // number_bytes
    num_tiles = triton.cdiv(width, block_n) * triton.cdiv(rows, block_m)
    programs = PROGRAMS_WANTED // 2
    splits = min(MAX_SPLITS, _power_of_2_in(programs // num_tiles), _power_of_2_in(triton.cdiv(depth, block_k)))
    if block_n == BLOCK_N and num_tiles >= WHOLE_TILES and depth * number_bytes <= 2 * WHOLE_DEPTH:
        splits = 1
    # Larger sums leave no registers for a second program.
    is_alone = num_tiles * splits <= programs or block_n * block_m > 8192
    num_programs, num_warps = 1 if is_alone else 2, 4 if block_n == BLOCK_N else 8
    num_stages = shared_bytes() // num_programs // ((block_n + block_m) * block_k * number_bytes)
    return LinearCut(
        block_n=block_n,
        block_k=block_k,
        num_splits=splits,
        num_warps=num_warps,
        num_stages=max(2, min(MAX_STAGES, num_stages)),
        max_registers=None if block_n == BLOCK_N else max_registers(num_warps, num_programs),
    )


def to_fp8(weight: torch.Tensor) -> Fp8Matrix:
    """Quantize a matrix [out, in], contiguous, to FP8 with a scale per output."""
    held, spans = quantize_rows(weight, FP8)
    return Fp8Matrix.of(held, spans / LIMIT_BY_DTYPE[FP8])


def from_int4(matrix: Int4Matrix) -> torch.Tensor:
    """Dequantize a matrix to [out, in] in the dtype of its scales."""
    width, depth = matrix.shape
    out = torch.empty(width, depth, dtype=matrix.dtype, device=matrix.held.device)
    from_int4_kernel[(triton.cdiv(width, BLOCK_N), depth // BLOCK)](
        matrix.held,
        matrix.units,
        out,
        width,
        depth,
        GROUP=matrix.group,
        BLOCK_N=BLOCK_N,
        num_warps=4,
    )
    return out


def _tile_rows(rows: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(rows))))


def _power_of_2_in(count: int) -> int:
    """Return the largest power of two up to `count`, at least 1."""
    return 1 << max(0, count.bit_length() - 1)


def num_splits(tiles: int, steps: int) -> int:
    """Return how many programs split a depth of `steps`: more for fewer tiles, a power of two."""
    wanted = triton.next_power_of_2(triton.cdiv(2 * PROGRAMS_WANTED, tiles))
    return int(min(MAX_SPLITS, wanted, triton.next_power_of_2(steps)))
