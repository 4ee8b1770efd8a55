"""`kernels.logit_edits.reference` on a GPU, masks and penalties at once."""

from __future__ import annotations

import torch
import triton

from kernels.logit_edits.kernel import logit_edits_kernel

PART, BLOCK = 8192, 2048
"""Tokens of a program, and those that it edits at once."""
WORD_BITS = 32


def edit_logits(
    logits: torch.Tensor,
    edits: torch.Tensor,
    words: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
) -> None:
    """Mask and penalize rows of `logits` [rows, vocab] float32, contiguous, in place.

    Args:
        edits: [n, 6] int64: the row of logits; that of the tables, -1 for no penalties; that of the masks, -1 for none;
            and repetition, frequency and presence penalties, as bits of float64.
        words: [masks, words] int32, a bit for each token from the lowest on, set if it is allowed.
        in_prompt, output_counts: tables [table rows, vocab], bool and int32; any of these types if no edit has one.
    """
    if len(edits):
        vocab = logits.shape[1]
        logit_edits_kernel[(len(edits), triton.cdiv(vocab, PART))](
            logits,
            edits,
            words,
            in_prompt,
            output_counts,
            vocab,
            words.shape[1],
            PART=PART,
            BLOCK=BLOCK,
            num_warps=4,
        )
