"""Processing of logits before a draw: penalties, masks, and truncation to the candidates.

Every function treats rows independently, with parameters for each row, so a row's result does not depend on the other
rows. Logits are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """Parameters of each row, float32 [rows, 1]; 1, 0 and 0 change nothing."""

    repetition: torch.Tensor
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The tokens that a draw chooses from.

    Attributes:
        scores: [rows, n] float32, log-probabilities up to a constant per row; -inf where truncated.
        token_ids: [rows, n] int64, or None where column i is token i.
    """

    scores: torch.Tensor
    token_ids: torch.Tensor | None


def penalize(
    logits: torch.Tensor, penalties: Penalties, in_prompt: torch.Tensor, output_counts: torch.Tensor
) -> torch.Tensor:
    """Return logits [rows, vocab] penalized for tokens seen before.

    Repetition divides positive and multiplies negative logits of tokens in prompt or output (Keskar et al., 2019, CTRL,
    section 4.1, in the sign-aware form of transformers). Then frequency times count, and presence, are subtracted for
    tokens of the output (OpenAI API reference).

    Args:
        logits: [rows, vocab].
        penalties: of each row.
        in_prompt: bool [rows, vocab].
        output_counts: int32 [rows, vocab].
    """
    in_output = output_counts > 0
    factor = torch.where(in_prompt | in_output, penalties.repetition, 1.0)
    edited = torch.where(logits > 0, logits / factor, logits * factor)
    return edited - output_counts * penalties.frequency - in_output * penalties.presence


def scale(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return (logits - row maximum) / temperature, for temperatures [rows, 1] above zero.

    The maximum is subtracted first, and temperatures are at least 1e-30: a tiny one gives 0 and huge negative numbers.
    """
    return (logits - logits.amax(dim=-1, keepdim=True)) / temperature.clamp(min=1e-30)


def keep_min_p(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Mask tokens less than `min_p` [rows, 1] times as likely as the row's likeliest (Nguyen et al., 2024, min-p)."""
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) + min_p.log(), -torch.inf)


def keep_top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Mask all but the smallest set of tokens with total probability at least `top_p` [rows, 1].

    Scores [rows, n] are sorted, likeliest first; the first is always kept. The sum is in float64, so that devices agree
    on the cut, and over probabilities relative to the likeliest token's: equally likely tokens then add whole numbers,
    and the cut is exact. Source: nucleus sampling (Holtzman et al., 2020, section 3.1).
    """
    wide = scores.double()
    masses = (wide - wide.amax(dim=-1, keepdim=True)).exp()
    is_out = masses.cumsum(dim=-1) - masses >= top_p * masses.sum(dim=-1, keepdim=True)
    is_out[:, 0] = False
    return scores.masked_fill(is_out, -torch.inf)


def select_top_k(scores: torch.Tensor, top_k: int) -> Candidates:
    """Return the `top_k` likeliest tokens of each row, or all if it has fewer; likeliest first, equal ones by id.

    Score and id are packed into one integer that orders like the pair, because `topk` alone breaks ties differently on
    every device. A row with NaN gets meaningless ids, and raises no error that would fail the other rows.
    """
    vocab_size = scores.shape[1]
    # Adding zero turns -0.0 into 0.0. Read as signed integers, floats of one sign sort by their bits: negative ones in
    # reverse, which flipping all bits but the sign undoes.
    bits = (scores + 0.0).view(torch.int32)
    ordered = bits ^ (bits >> 31).bitwise_and_(0x7FFFFFFF)
    descending_id = torch.arange(vocab_size - 1, -1, -1, device=scores.device)
    keys = (ordered.to(torch.int64) << 32).bitwise_or_(descending_id)
    top = keys.sort(dim=-1, descending=True).values if top_k >= vocab_size else keys.topk(top_k, dim=-1).values
    token_ids = (vocab_size - 1) - top.bitwise_and_(0xFFFFFFFF)
    return Candidates(scores=scores.gather(1, token_ids), token_ids=token_ids)
