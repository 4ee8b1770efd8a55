"""Truncation of a distribution beyond top-k, top-p and min-p.

Each function takes scores [rows, n], natural logarithms of probabilities up to a constant per row (-inf where already
truncated), and parameters [rows, 1]. At least one token is always kept, and a neutral parameter changes nothing. Sums
are in float64, so that devices agree on the cut.
"""

from __future__ import annotations

import torch


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
