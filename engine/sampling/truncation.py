"""Truncation of a distribution to the tokens that a draw chooses from.

Functions take scores [rows, n], natural logarithms of probabilities up to a constant per row (-inf where already
truncated), and, but for `select_top_k`, parameters [rows, 1]. They treat rows independently, at least one token is
always kept, and a neutral parameter changes nothing. Sums are in float64, so that devices agree on the cut.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.token_logprobs.reference import likeliest


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The tokens that a draw chooses from.

    Attributes:
        scores: [rows, n] float32, log-probabilities up to a constant per row; -inf where truncated.
        token_ids: [rows, n] int64, or None where column i is token i.
    """

    scores: torch.Tensor
    token_ids: torch.Tensor | None


def select_top_k(scores: torch.Tensor, top_k: int) -> Candidates:
    """Return the `top_k` likeliest tokens of each row, or all if it has fewer; likeliest first, equal ones by id."""
    token_ids = likeliest(scores, top_k)
    return Candidates(scores=scores.gather(1, token_ids), token_ids=token_ids)


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


def keep_top_n_sigma(scores: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Mask tokens more than `n` standard deviations below the highest; infinite n keeps all.

    The deviation is of all scores of the vocabulary that are not masked. Temperature has no effect, as it scales both
    sides. Source: Tang et al., 2024, "Top-n-sigma: not all logits are you need", arXiv 2411.07641, section 3.
    """
    is_there = scores.isfinite()
    wide = torch.where(is_there, scores, 0.0).double()
    count = is_there.sum(dim=-1, keepdim=True)
    mean = wide.sum(dim=-1, keepdim=True) / count
    spread = torch.where(is_there, (wide - mean) ** 2, 0.0).sum(dim=-1, keepdim=True) / count
    # Zero times infinity would be NaN.
    distance = torch.where(n.isinf(), torch.inf, n * spread.sqrt())
    return scores.masked_fill(scores < scores.amax(dim=-1, keepdim=True) - distance, -torch.inf)


def keep_typical(scores: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """Mask all but the tokens whose surprisal is closest to the entropy, up to total probability `mass`; 1 keeps all.

    Source: Meister et al., 2022, "Locally typical sampling", arXiv 2202.00666, section 4.
    """
    logprobs, probabilities = _distribution(scores)
    surprise_off = (-logprobs - _entropy(logprobs, probabilities)).abs()
    order = surprise_off.sort(dim=-1, stable=True).indices
    ordered = probabilities.gather(1, order)
    is_out = (ordered.cumsum(dim=-1) - ordered >= mass) & (mass < 1)
    is_out[:, 0] = False
    return scores.masked_fill(torch.zeros_like(is_out).scatter(1, order, is_out), -torch.inf)


def keep_epsilon(scores: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Mask tokens less probable than `epsilon`; 0 keeps all.

    Source: Hewitt et al., 2022, "Truncation sampling as language model desmoothing", arXiv 2210.15191, section 4.1.
    """
    _, probabilities = _distribution(scores)
    return _mask_below(scores, probabilities, epsilon.double())


def keep_eta(scores: torch.Tensor, epsilon: torch.Tensor) -> torch.Tensor:
    """Mask tokens less probable than min(epsilon, sqrt(epsilon) * e^-entropy); 0 keeps all.

    Source: Hewitt et al., 2022, arXiv 2210.15191, section 4.2.
    """
    logprobs, probabilities = _distribution(scores)
    wide = epsilon.double()
    threshold = torch.minimum(wide, wide.sqrt() * (-_entropy(logprobs, probabilities)).exp())
    return _mask_below(scores, probabilities, threshold)


def exclude_top_choices(
    scores: torch.Tensor, threshold: torch.Tensor, probability: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Where `uniform` is below `probability`, mask tokens at least `threshold` probable except the least likely one.

    Equally likely tokens are kept together. Source: XTC ("exclude top choices"), P. E. Weidmann, 2024, as implemented
    by interfaces for text generation.
    """
    _, probabilities = _distribution(scores)
    # What is masked stays so, however low the threshold.
    is_top = (probabilities >= threshold) & (probabilities > 0)
    least = torch.where(is_top, probabilities, torch.inf).amin(dim=-1, keepdim=True)
    is_out = is_top & (probabilities > least) & (uniform < probability)
    return scores.masked_fill(is_out, -torch.inf)


def _distribution(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(scores.double(), dim=-1)
    return logprobs, logprobs.exp()


def _entropy(logprobs: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
    return -torch.where(probabilities > 0, probabilities * logprobs, 0.0).sum(dim=-1, keepdim=True)


def _mask_below(scores: torch.Tensor, probabilities: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    is_out = (probabilities < threshold) & (probabilities < probabilities.amax(dim=-1, keepdim=True))
    return scores.masked_fill(is_out, -torch.inf)
