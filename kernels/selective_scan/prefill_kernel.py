"""GPU kernels for the selective scan of rows of many tokens, in chunks of CHUNK tokens.

With L the cumulative sum of a dt in a chunk, outputs of a chunk that starts from state S are

    y = diag(exp(L)) C S^T + M X + d X,    M[i, j] = (c[i] . b[j]) exp(L[i] - L[j]) dt[j]  for j <= i, else 0

and the next chunk starts from exp(L[last]) S + (diag(exp(L[last] - L) dt) X)^T B. The first kernel computes what needs
no state, of all chunks at once; the second one goes from chunk to chunk.

Source: Dao and Gu, 2024, Transformers are SSMs, arXiv 2405.21060, section 6.
"""

import triton
import triton.language as tl

from kernels.overlap import take_turn


@triton.jit(do_not_specialize=["tokens", "num_heads"])
def selective_chunks_kernel(
    x,
    dt,
    a,
    b,
    c,
    d,
    y,
    fades,
    gains,
    tokens,
    num_heads,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    HAS_D: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (chunk, part, row) computes M X + d X for `num_heads` heads of a group, BLOCK dimensions at a time.

    Strides are between tokens. `fades` and `gains`, float32 [rows, HEADS, tokens], are exp(L) and exp(L[last] - L) dt.
    """
    take_turn(OVERLAPS)
    start, row = tl.program_id(0) * CHUNK, tl.program_id(2).to(tl.int64)
    at, some = tl.arange(0, CHUNK), tl.arange(0, BLOCK)
    is_token, first = at < tokens - start, row * tokens + start
    first_head = tl.program_id(1) * num_heads
    group = first_head // (HEADS // GROUPS)
    dtype = x.dtype.element_ty
    b += first * b_stride + group * STATE_DIM
    c += first * c_stride + group * STATE_DIM
    scores = tl.zeros((CHUNK, CHUNK), tl.float32)
    for column in range(0, STATE_DIM, BLOCK):
        inside = is_token[:, None] & (column + some < STATE_DIM)[None, :]
        taken = tl.load(b + (at[:, None] * b_stride + column + some[None, :]), mask=inside, other=0.0)
        read = tl.load(c + (at[:, None] * c_stride + column + some[None, :]), mask=inside, other=0.0)
        scores = tl.dot(read, tl.trans(taken), scores, input_precision=PRECISION)
    for head in range(first_head, first_head + num_heads):
        steps = tl.load(dt + (first + at) * HEADS + head, mask=is_token, other=0.0)
        falls = steps * tl.load(a + head)
        # Nothing is left anyway, and differences of larger sums would lose digits.
        falls = tl.where(falls < -100.0, -100.0, falls)
        total, last = tl.cumsum(falls, 0), tl.sum(falls, 0)
        flat = (row * HEADS + head) * tokens + start + at
        tl.store(fades + flat, tl.exp(total), mask=is_token)
        tl.store(gains + flat, tl.exp(last - total) * steps, mask=is_token)
        # Masked before the exponential, which would overflow above the diagonal.
        falls_between = tl.where(at[:, None] >= at[None, :], total[:, None] - total[None, :], -float("inf"))
        mixed = (scores * tl.exp(falls_between) * steps[None, :]).to(dtype)
        for column in range(0, HEAD_DIM, BLOCK):
            outputs = head * HEAD_DIM + column + some
            inside = is_token[:, None] & (column + some < HEAD_DIM)[None, :]
            at_inputs = x + first * x_stride + (at[:, None] * x_stride + outputs[None, :])
            inputs = tl.load(at_inputs, mask=inside, other=0.0)
            found = tl.dot(mixed, inputs, input_precision=PRECISION)
            if HAS_D:
                found += inputs.to(tl.float32) * tl.load(d + head)
            at_outputs = y + first * HEADS * HEAD_DIM + (at[:, None] * HEADS * HEAD_DIM + outputs[None, :])
            tl.store(at_outputs, found.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def selective_scan_kernel(
    x,
    b,
    c,
    states,
    y,
    fades,
    gains,
    tokens,
    x_stride,
    b_stride,
    c_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    STATE_DIM: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PRECISION: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Program (part, head, row) takes BLOCK_P rows of a head's state through all chunks, and adds what they read to y.

    They are held transposed, because the matrix instructions of some GPUs take no fewer than 64 rows.
    """
    take_turn(OVERLAPS)
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    at, columns = tl.arange(0, CHUNK), tl.arange(0, BLOCK_N)
    outputs = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_output, is_column = outputs < HEAD_DIM, columns < STATE_DIM
    group, first = head // (HEADS // GROUPS), row * tokens
    dtype = x.dtype.element_ty
    x += first * x_stride + head * HEAD_DIM
    b += first * b_stride + group * STATE_DIM
    c += first * c_stride + group * STATE_DIM
    y += (first * HEADS + head) * HEAD_DIM
    fades += (row * HEADS + head) * tokens
    gains += (row * HEADS + head) * tokens
    states += (row * HEADS + head) * HEAD_DIM * STATE_DIM
    own = outputs[None, :] * STATE_DIM + columns[:, None]
    state = tl.load(states + own, mask=is_column[:, None] & is_output[None, :], other=0.0)
    to_outputs = at[:, None] * HEADS * HEAD_DIM + outputs[None, :]
    # Loaded a chunk ahead, as the compiler does with operands of products only.
    are_outputs = (at < tokens)[:, None] & is_output[None, :]
    known = tl.load(y + to_outputs, mask=are_outputs, other=0.0)
    fade = tl.load(fades + at, mask=at < tokens, other=0.0)
    kept = tl.load(fades + tl.minimum(CHUNK, tokens) - 1)
    for start in range(0, tokens, CHUNK):
        is_token, is_next = at < tokens - start, at < tokens - start - CHUNK
        are_columns, are_outputs = is_token[:, None] & is_column[None, :], is_token[:, None] & is_output[None, :]
        are_next = is_next[:, None] & is_output[None, :]
        next_known = tl.load(y + CHUNK * HEADS * HEAD_DIM + to_outputs, mask=are_next, other=0.0)
        next_fade = tl.load(fades + start + CHUNK + at, mask=is_next, other=0.0)
        next_kept = tl.load(fades + tl.minimum(start + 2 * CHUNK, tokens) - 1)
        read = tl.load(c + (at[:, None] * c_stride + columns[None, :]), mask=are_columns, other=0.0)
        found = tl.dot(read, state.to(dtype), input_precision=PRECISION) * fade[:, None] + known.to(tl.float32)
        tl.store(y + to_outputs, found.to(dtype), mask=are_outputs)
        taken = tl.load(b + (at[:, None] * b_stride + columns[None, :]), mask=are_columns, other=0.0)
        inputs = tl.load(x + (at[:, None] * x_stride + outputs[None, :]), mask=are_outputs, other=0.0)
        gain = tl.load(gains + start + at, mask=is_token, other=0.0)
        added = (inputs.to(tl.float32) * gain[:, None]).to(dtype)
        state = tl.dot(tl.trans(taken), added, state * kept, input_precision=PRECISION)
        known, fade, kept = next_known, next_fade, next_kept
        x += CHUNK * x_stride
        b += CHUNK * b_stride
        c += CHUNK * c_stride
        y += CHUNK * HEADS * HEAD_DIM
    tl.store(states + own, state, mask=is_column[:, None] & is_output[None, :])
