"""Row lookup by index: for token embeddings, rotary tables and the rows to sample from; and pending token ids.

out[t] = x[index[t]]
"""

from __future__ import annotations

import torch


def take_rows(x: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Return the rows [len(indices), ...] of `x`; `indices` are int64 and in range."""
    return x[indices]


def put_drawn(token_ids: torch.Tensor, rows: torch.Tensor, drawn: torch.Tensor, pending: int) -> None:
    """Replace pending ids by the tokens sampled on the device, in place.

    Args:
        token_ids: [tokens] int64; other negative ids become 0.
        rows: [tokens, 4] int64 as in `kernels.paged_attention.launch`, row t for token t; the last column is the index
            in `drawn` of its token.
        drawn: [any] int64; negative for a failed row, which continues with token 0 until its end is known.
        pending: the id that marks a token as not yet known.
    """
    last = drawn[rows[:, 3]]
    token_ids.copy_(torch.where(token_ids == pending, last, token_ids).clamp_(min=0))
