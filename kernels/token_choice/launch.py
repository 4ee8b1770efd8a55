"""Choosing tokens on a GPU as `kernels.token_choice.reference` defines the draw."""

from __future__ import annotations

import torch

from kernels.token_choice.kernel import token_choice_kernel

BLOCK = 4096
"""A row is one program's, so that what it has under way at once is all that keeps memory busy."""


def choose_tokens(logits: torch.Tensor, knobs: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """Return a token id (int64, [rows]) for each row of `logits` [rows, vocab] float32, contiguous.

    -1 where a row holds NaN or infinity, or nothing but minus infinity. Of equal logits the lowest id is the likeliest.

    Args:
        knobs: [rows, 4] float64: temperature, 0 for the likeliest token; the natural logarithm of min-p; top-k, 0 for
            all; top-p, 1 for all. Which tokens are kept is `engine.sampling.logits`' affair: `kernels.token_choice.
            truncation` keeps the same ones.
        seeds: [rows, 2] int64: the seed and the position of the draw, below 2^31.
    """
    rows, vocab = logits.shape
    chosen = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        token_choice_kernel[(rows,)](logits, knobs, seeds, chosen, vocab, BLOCK=BLOCK, num_warps=16)
    return chosen
