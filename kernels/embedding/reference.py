"""Rows picked out of a matrix by index: the embedding of tokens, the positions of a table, the tokens that are sampled.

out[t] = x[index[t]]
"""

from __future__ import annotations

import torch


def take_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows [len(indices), ...] of `x`; `indices` are int64 and within its length."""
    return x[indices]
