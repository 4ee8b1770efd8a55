"""GPU kernels that multiply rows by their experts, in tiles of rows of one expert, and sum over each row's experts.

Products are transposed, like those of `kernels.streamed_linear`: matrix instructions want many rows on their left side,
which the weights always have, but the tokens may not.
"""

import triton
import triton.language as tl

from kernels.gated_activation.kernel import gated
from kernels.mxfp4.kernel import add_mxfp4
from kernels.overlap import take_turn
from kernels.streamed_linear.kernel import add_int4, tile_of


@triton.jit(do_not_specialize=["experts", "sharers"])
def expert_product_kernel(
    x,
    weight,
    units,
    biases,
    slots,
    tiles,
    num_tiles,
    out,
    width,
    depth,
    experts,
    sharers,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMIT: tl.constexpr,
    GROUP: tl.constexpr,
    IS_MXFP4: tl.constexpr,
    SUMS_APART: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A program computes BLOCK_N columns of `out` [pairs, width] for one tile of pairs, all of the same expert.

    `slots`, `tiles` and `num_tiles` are made by `route_kernel`. Pair p reads row p // sharers of `x` [any,
    depth]. `weight` is [experts * width, depth]. With an ACTIVATION it is [experts * 2 * width, depth], and the result
    is a(gate) * up, as `kernels.gated_activation` defines it. Weights are int4 in groups of GROUP inputs if GROUP is
    not 0; MXFP4 if IS_MXFP4, added as SUMS_APART tells `add_mxfp4`; FP8 with maximum LIMIT and per-row `units` if LIMIT
    is above 0; else of the type of `x`. If HAS_BIAS, `biases` has one element per row of `weight`. Programs are ordered
    by tile within NEIGHBOURS tiles, then by columns, so that concurrent ones share weights and rows in the cache.
    """
    take_turn(OVERLAPS)
    IS_GATED: tl.constexpr = ACTIVATION != ""
    PARTS: tl.constexpr = 2 if IS_GATED else 1
    dtype = out.dtype.element_ty
    program, num_columns = tl.program_id(0), tl.cdiv(width, BLOCK_N)
    leader = program // (NEIGHBOURS * num_columns) * NEIGHBOURS
    num_grouped = tl.minimum(tl.num_programs(0) // num_columns - leader, NEIGHBOURS)
    within = program - leader * num_columns
    tile = leader + within % num_grouped
    # Loaded before it is known whether the tile exists, which saves a round trip to memory.
    expert, first, end = tl.load(tiles + tile * 3), tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tile >= tl.load(num_tiles):
        return
    slot = first + tl.arange(0, BLOCK_M)
    is_pair = slot < end
    pair = tl.load(slots + slot, mask=is_pair, other=0)
    row = pair // sharers
    begun = within // num_grouped * BLOCK_N
    # Gate rows, then up rows.
    line = tl.arange(0, PARTS * BLOCK_N)
    n = begun + line % BLOCK_N
    is_line = n < width
    line, num_lines = (expert * PARTS + line // BLOCK_N) * width + n, experts * PARTS * width
    # Lines and rows of 4-bit products are not masked: that would be a sixth of the loop's instructions.
    there = tl.minimum(line, num_lines - 1)
    product = tl.zeros([PARTS * BLOCK_N, BLOCK_M], tl.float32)
    if LIMIT > 0:
        # Loaded early: at the end each program would wait for them.
        unit = tl.load(units + line, mask=is_line, other=0.0) * LIMIT
    for at in range(0, depth, BLOCK_K):
        if GROUP:
            product = add_int4(product, x, row, weight, units, there, num_lines, depth, at, GROUP)
        elif IS_MXFP4:
            product = add_mxfp4(product, x, row, weight, units, there, depth, at, SUMS_APART)
        else:
            w_tile = tile_of(weight, line, is_line, depth, at, depth, BLOCK_K)
            if LIMIT > 0:
                # By way of float32: the default conversion, by way of float16, takes twice as long.
                w_tile = w_tile.to(tl.float32).to(x.dtype.element_ty)
            x_tile = tl.trans(tile_of(x, row, is_pair, depth, at, depth, BLOCK_K))
            product = tl.dot(w_tile, x_tile, product, input_precision="ieee")
    if LIMIT > 0:
        product *= unit[:, None]
    if HAS_BIAS:
        product += tl.load(biases + line, mask=is_line, other=0.0).to(tl.float32)[:, None]
    n = begun + tl.arange(0, BLOCK_N)
    made = product.to(dtype)
    if IS_GATED:
        gate, up = tl.split(tl.permute(tl.reshape(made, [2, BLOCK_N, BLOCK_M]), [1, 2, 0]))
        made = gated(gate, up, ACTIVATION)
    place = pair.to(tl.int64)[None, :] * width + n[:, None]
    tl.store(out + place, made, mask=(n < width)[:, None] & is_pair[None, :])


@triton.jit
def expert_sum_kernel(parts, weights, out, width, CHOSEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program (row, part) sums BLOCK columns of `parts` [rows, CHOSEN, width], weighted by `weights` [rows, CHOSEN]."""
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(CHOSEN):
        part = tl.load(parts + (row * CHOSEN + place) * width + column, mask=column < width, other=0.0)
        total += tl.load(weights + row * CHOSEN + place) * part.to(tl.float32)
    tl.store(out + row * width + column, total.to(out.dtype.element_ty), mask=column < width)
