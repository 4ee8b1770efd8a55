"""Masks of a vocabulary, as grammars and kernels have them: a bit for each token, from the lowest on, set if allowed.

What a mask has no bits for is not allowed.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from engine.placing import placed
from kernels.logit_edits import reference

Bits = npt.NDArray[np.uint8]


def packed(is_allowed: npt.NDArray[np.bool_]) -> Bits:
    """Return the mask of these tokens."""
    return np.packbits(is_allowed, bitorder="little")


def unpacked(bits: Bits, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Return whether each token is allowed: [vocab_size]."""
    return np.unpackbits(bits, count=vocab_size, bitorder="little").astype(bool)


def joint(first: Bits, second: Bits) -> Bits:
    """Return the mask of the tokens that both allow."""
    count = min(len(first), len(second))
    return first[:count] & second[:count]


def mask(logits: torch.Tensor, bits: Bits) -> None:
    """Mask all tokens in the logits [vocab] that are not allowed. NaN stays NaN."""
    reference.mask(logits, placed(unpacked(bits, len(logits)), logits.device, torch.bool))
