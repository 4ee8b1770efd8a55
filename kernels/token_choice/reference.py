"""Sampling a token: a race between exponential clocks whose noise is a pure function of (seed, position, token).

    choice = argmax_i  score_i - ln E_i,      E_i = -ln(1 - v_i),      v_i in (0, 1) from Philox

which draws i with probability softmax(score)_i (the Gumbel-max trick: -ln E_i is a Gumbel variable). A single uniform
variable and an inverse CDF would need less noise, but then rounding of any probability moves every later boundary. In a
race the noise belongs to the token: the draw does not depend on the rest of the batch or on truncated tokens, and if
two devices' probabilities differ by a total variation of d, their draws differ with probability at most 2d / (1 + d).
So a stream resumed elsewhere continues as it would have.

Sources: J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Philox4x32-10); C. Maddison et al.,
"A* sampling", NeurIPS 2014 (Gumbel-max); M. Daliri et al., "Coupling without communication and drafter-invariant
speculative decoding", 2024, arXiv 2408.07978 (the bound).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9
_WEYL_1 = 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Four int64 tensors of 32-bit words that broadcast against each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawKeys:
    """The keys that determine the noise of each row: 32-bit words in int64, each [rows, 1]."""

    seed_low: torch.Tensor
    seed_high: torch.Tensor
    position: torch.Tensor


def philox_4x32(counter: Words, key_0: torch.Tensor, key_1: torch.Tensor) -> Words:
    """Encrypt counters of four 32-bit words under keys of two: Philox4x32-10, elementwise with broadcasting."""
    c0, c1, c2, c3 = counter
    for _ in range(_ROUNDS):
        # int64 wraps at 2^64, and masking after the arithmetic shift leaves the exact high word.
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0 = (product_1 >> 32).bitwise_and_(_WORD) ^ c1 ^ key_0
        c2 = (product_0 >> 32).bitwise_and_(_WORD) ^ c3 ^ key_1
        c1 = product_1.bitwise_and_(_WORD)
        c3 = product_0.bitwise_and_(_WORD)
        key_0 = (key_0 + _WEYL_0) & _WORD
        key_1 = (key_1 + _WEYL_1) & _WORD
    return c0, c1, c2, c3


def gumbel_noise(keys: DrawKeys, token_ids: torch.Tensor) -> torch.Tensor:
    """Return the noise [rows, n] (float32) of the given tokens (int64, [rows, n])."""
    zero = torch.zeros_like(keys.position)
    words = philox_4x32((token_ids >> 2, keys.position, zero, zero), keys.seed_low, keys.seed_high)
    lane = token_ids & 3
    low = torch.where((lane & 1) == 0, words[0], words[1])
    high = torch.where((lane & 1) == 0, words[2], words[3])
    return _gumbel(torch.where(lane < 2, low, high))


def gumbel_noise_of_all(keys: DrawKeys, vocab_size: int) -> torch.Tensor:
    """Return the noise [rows, vocab] of all tokens: `gumbel_noise` of 0..vocab-1 at a quarter of the cost."""
    num_counters = (vocab_size + 3) // 4
    zero = torch.zeros_like(keys.position)
    counters = torch.arange(num_counters, device=keys.position.device).unsqueeze(0)
    words = philox_4x32((counters, keys.position, zero, zero), keys.seed_low, keys.seed_high)
    noise = torch.stack([_gumbel(word) for word in words], dim=-1)
    return noise.flatten(-2)[:, :vocab_size]


def race(scores: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return the winning column (int64, [rows]) for scores [rows, n] in log space; -inf never wins against a number."""
    return (scores + noise).argmax(dim=-1)


def _gumbel(word: torch.Tensor) -> torch.Tensor:
    """Map 32-bit words (int64) to standard Gumbel variables (float32).

    v = (word + 1/2) / 2^32 is small for tokens that can win, where float32 still resolves every word; at the other end
    it is clamped below 1, so that no clock is infinite.
    """
    v = word.to(torch.float32).add_(0.5).mul_(2.0**-32).clamp_(max=1.0 - 2.0**-24)
    return v.neg_().log1p_().neg_().log_().neg_()
