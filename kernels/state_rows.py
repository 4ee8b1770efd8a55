"""Which states, of those held for all sequences, belong to the rows of a step."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch


class StateRows(NamedTuple):
    """The rows of a step with one token each, as the device knows them.

    Attributes:
        places: index of each row's states, int64 [rows]; rows that pad a recorded step share one that nobody reads.
        are_new: whether the token is a sequence's first, whose states are zeros before it, bool [rows].
    """

    places: torch.Tensor
    are_new: torch.Tensor


def token_stride(x: torch.Tensor) -> int:
    """Return how far apart the tokens of `x` [rows, tokens, ...] are, each of them contiguous."""
    # The stride of a dimension of one may be anything.
    return x.stride(1) if x.shape[1] > 1 else x.stride(0) if len(x) > 1 else prod(x.shape[2:])
