"""Choosing tokens on a GPU as `kernels.token_choice.reference` defines the draw."""

from __future__ import annotations

import torch
import triton

from kernels.token_choice.kernel import token_choice_kernel

BLOCK, PART = 4096, 16_384
"""Of what a program looks at at once in a race, and of all that it looks at. However many rows there are, or draws
would depend on them: what scores are measured from is a part's.
"""
KEPT = 1024
"""Of a part's logits, as many as a cut row is decided among at most."""


def counters(max_rows: int, device: torch.device) -> torch.Tensor:
    """Return what the programs of a row count by: int32, zeros again after each launch."""
    return torch.zeros(max_rows, dtype=torch.int32, device=device)


def choose_tokens(
    logits: torch.Tensor, knobs: torch.Tensor, seeds: torch.Tensor, arrived: torch.Tensor
) -> torch.Tensor:
    """Return a token id (int64, [rows]) for each row of `logits` [rows, vocab] float32, contiguous.

    -1 where a row holds NaN or infinity, or nothing but minus infinity. Of equal logits the lowest id is the likeliest.

    Args:
        knobs: [rows, 4] float64: temperature, 0 for the likeliest token; the natural logarithm of min-p; top-k, 0 for
            all; top-p, 1 for all. Which tokens are kept is `engine.sampling.logits`' affair: `kernels.token_choice.
            truncation` keeps the same ones.
        seeds: [rows, 2] int64: the seed and the position of the draw, below 2^31.
        arrived: `counters`; no other launch may use them meanwhile.
    """
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        num_parts = triton.cdiv(vocab, PART)

        def for_parts(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

        token_choice_kernel[(rows, num_parts)](
            logits,
            knobs,
            seeds,
            for_parts(2, num_parts, dtype=torch.float32),
            for_parts(num_parts, dtype=torch.int64),
            for_parts(num_parts, dtype=torch.int32),
            for_parts(num_parts, KEPT, dtype=torch.float32),
            for_parts(num_parts, KEPT, dtype=torch.int32),
            arrived,
            chosen,
            vocab,
            PART=PART,
            NUM_PARTS=num_parts,
            BLOCK_P=triton.next_power_of_2(num_parts),
            BLOCK=BLOCK,
            KEPT=KEPT,
            num_warps=16,
        )
    return chosen
