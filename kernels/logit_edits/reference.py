"""Edits of logits before a draw: masks of allowed tokens, and penalties for tokens seen before.

Every function treats rows independently, with parameters for each row, so a row's result does not depend on the other
rows. Logits are float32. NaN stays NaN, so that the check for finite numbers sees it.
"""

from __future__ import annotations

import torch


def mask(logits: torch.Tensor, is_allowed: torch.Tensor) -> None:
    """Set logits to minus infinity, in place, where bool `is_allowed` of the same shape is False."""
    logits.sub_(torch.where(is_allowed, 0.0, torch.inf))


def penalize(
    logits: torch.Tensor,
    in_prompt: torch.Tensor,
    output_counts: torch.Tensor,
    *,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Return logits [rows, vocab] penalized for tokens seen before.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al., 2019, CTRL,
    section 4.1, in the sign-aware form of transformers). Then frequency times count, and presence, are subtracted for
    tokens of the output (OpenAI API reference).

    Args:
        logits: [rows, vocab].
        in_prompt: bool [rows, vocab].
        output_counts: int32 [rows, vocab].
        repetition, frequency, presence: of each row, float32 [rows, 1]; 1, 0 and 0 change nothing.
    """
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, repetition, 1.0)
    edited = torch.where(logits > 0, logits / factor, logits * factor)
    return edited - output_counts * frequency - in_output * presence
