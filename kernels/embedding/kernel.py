"""GPU kernels at the start of each step: insert the tokens sampled by the previous step, and look up embeddings."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def take_rows_kernel(x, indices, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program (t, part) copies BLOCK columns of row `indices` [t] of `x` [any, WIDTH] to row t of `out`."""
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x + tl.load(indices + row) * WIDTH + columns
    tl.store(out + row * WIDTH + columns, tl.load(source, mask=columns < WIDTH), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["num_tokens", "pending"])
def put_drawn_kernel(token_ids, rows, drawn, num_tokens, pending, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Replace `pending` ids in `token_ids` [tokens] by tokens of `drawn`, indexed by the last column of `rows`."""
    take_turn(OVERLAPS)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    known = tl.load(token_ids + token, mask=inside, other=0)
    last = tl.load(drawn + tl.load(rows + token * 4 + 3, mask=inside, other=0), mask=inside, other=0)
    tl.store(token_ids + token, tl.maximum(tl.where(known == pending, last, known), 0), mask=inside)
