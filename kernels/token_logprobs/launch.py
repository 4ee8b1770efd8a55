"""`kernels.token_logprobs.reference` on a GPU."""

from __future__ import annotations

import torch
import triton

from kernels.token_logprobs.kernel import joined_logprobs_kernel, logprob_parts_kernel

PART = 4096
"""Tokens of a program."""
MAX_TOP = 32
"""Most likeliest tokens of a row."""


def tell(logits: torch.Tensor, token_ids: torch.Tensor, num_top: int) -> torch.Tensor:
    """Return the log-probabilities of a token of each row, its rank, and the likeliest tokens.

    Args:
        logits: [rows, vocab] float32, contiguous.
        token_ids: [rows] int64, each below the vocabulary's size.
        num_top: how many of the likeliest tokens are returned, at most `MAX_TOP` and the vocabulary's size.

    Returns:
        [rows, 2 + 2 num_top] float64: log-probability and rank of the token, ids of the likeliest tokens, and their
        log-probabilities. Those of a row with NaN are meaningless.
    """
    assert num_top <= MAX_TOP, "more tokens than a part lists"
    rows, vocab = logits.shape
    told = torch.empty(rows, 2 + 2 * num_top, dtype=torch.float64, device=logits.device)
    if rows:
        num_parts = triton.cdiv(vocab, PART)
        sums = torch.empty(rows, num_parts, 2, dtype=torch.float32, device=logits.device)
        counts = torch.empty(rows, num_parts, dtype=torch.int32, device=logits.device)
        keys = torch.empty(rows, num_parts, MAX_TOP, dtype=torch.int64, device=logits.device)
        shared = logits, token_ids, sums, counts, keys
        logprob_parts_kernel[(rows, num_parts)](
            *shared, vocab, num_top, NUM_PARTS=num_parts, PART=PART, MAX_TOP=MAX_TOP, num_warps=8
        )
        joined_logprobs_kernel[(rows,)](
            *shared,
            told,
            vocab,
            num_top,
            NUM_PARTS=num_parts,
            BLOCK_P=triton.next_power_of_2(num_parts),
            MAX_TOP=MAX_TOP,
            num_warps=4,
        )
    return told
