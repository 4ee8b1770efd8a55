"""Samples tokens on a GPU, with draws as `kernels.token_choice.reference` defines them."""

from __future__ import annotations

import torch
import triton

from kernels.token_choice.kernel import token_choice_kernel

BLOCK, PART = 4096, 16_384
"""Tokens that a program handles at once in a race, and tokens of its part. Independent of the number of rows, or draws
would depend on it, because scores are relative to a part's highest logit.
"""
KEPT = 1024
"""Maximum logits that a part lists for a cut (truncated) row."""


def counters(max_rows: int, device: torch.device) -> torch.Tensor:
    """Return the counters of rows' finished programs: int32, zero again after each launch."""
    return torch.zeros(max_rows, dtype=torch.int32, device=device)


def choose_tokens(
    logits: torch.Tensor, knobs: torch.Tensor, seeds: torch.Tensor, arrived: torch.Tensor
) -> torch.Tensor:
    """Return a token id (int64, [rows]) for each row of `logits` [rows, vocab] float32, contiguous.

    The id is -1 if a row has NaN or infinity, or only minus infinity. Of equal logits the lowest id is the likeliest.

    Args:
        knobs: [rows, 4] float64: temperature, 0 for greedy; the natural logarithm of min-p; top-k, 0 for all; top-p, 1
            for all. `engine.sampling.truncation` defines which tokens are kept; `kernels.token_choice.truncation` keeps
            the same.
        seeds: [rows, 2] int64: the seed, and the position of the draw, below 2^31.
        arrived: `counters`, not shared with a concurrent launch.
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
            # Rows that do not all begin at a multiple of 64 bytes take more registers to read.
            BLOCK=BLOCK if vocab % 16 == 0 else BLOCK // 2,
            KEPT=KEPT,
            num_warps=16,
        )
    return chosen
