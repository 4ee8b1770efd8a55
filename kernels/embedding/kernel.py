"""The GPU's rows of a matrix, and the tokens that the step before has drawn: short kernels at the head of each step."""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit
def take_rows_kernel(x, indices, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Program (t, part) copies BLOCK numbers of row `indices` [t] of `x` [any, WIDTH] to `out` [rows, WIDTH]."""
    take_turn(OVERLAPS)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = x + tl.load(indices + row) * WIDTH + columns
    tl.store(out + row * WIDTH + columns, tl.load(source, mask=columns < WIDTH), mask=columns < WIDTH)


@triton.jit(do_not_specialize=["num_tokens", "pending"])
def put_drawn_kernel(token_ids, rows, drawn, num_tokens, pending, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    """Put into `token_ids` [tokens], where they are `pending`, what `drawn` has for the row in `rows` [tokens, 4]."""
    take_turn(OVERLAPS)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    known = tl.load(token_ids + token, mask=inside, other=0)
    last = tl.load(drawn + tl.load(rows + token * 4 + 3, mask=inside, other=0), mask=inside, other=0)
    tl.store(token_ids + token, tl.maximum(tl.where(known == pending, last, known), 0), mask=inside)
