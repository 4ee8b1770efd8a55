"""Rows picked out of a matrix by index: the embedding of tokens, the positions of a table, the tokens that are sampled.

out[t] = x[index[t]]
"""

from __future__ import annotations

import torch


def take_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows [len(indices), ...] of `x`; `indices` are int64 and within its length."""
    return x[indices]


def put_drawn(token_ids: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor, pending: int) -> None:
    """Put tokens that were drawn on the device where ids say that they are pending, in place.

    Args:
        token_ids: [tokens] int64; what is negative otherwise becomes 0.
        rows: [tokens, 4] int64 as `kernels.paged_attention.launch` has them, row t of token t; the last says where in
            `drawn` its token is.
        drawn: [any] int64; negative where a row has failed, which goes on with any token until its end is known.
    """
    last = drawn[rows[:, 3]]
    token_ids.copy_(torch.where(token_ids == pending, last, token_ids).clamp_(min=0))
