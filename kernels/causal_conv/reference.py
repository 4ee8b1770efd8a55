"""A short depthwise causal convolution along a sequence, usually followed by SiLU.

    y[t, c] = silu(bias[c] + sum over j of weight[c, j] * x[t - width + 1 + j, c])

Inputs before the first token come from the state: the last `width` inputs of a row, oldest first.

Source: Gu and Dao, 2023, Mamba, arXiv 2312.00752, section 3.4, for its place before a recurrent state.
"""

from __future__ import annotations

import torch
from torch.nn import functional


def causal_conv(
    x: torch.Tensor,
    state: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    is_activated: bool = True,
) -> torch.Tensor:
    """Return y [rows, tokens, channels] in the dtype of `x`, and update the state in place.

    Args:
        x: shaped like y.
        state: [rows, channels, width]; None for zeros that are not kept.
        weight: [channels, width].
        bias: [channels]; None for none.
        is_activated: whether SiLU follows.
    """
    channels, width = weight.shape
    before = x.new_zeros(len(x), channels, width) if state is None else state
    whole = torch.cat([before, x.transpose(1, 2)], dim=-1)
    if state is not None:
        state.copy_(whole[..., -width:])
    y = functional.conv1d(whole[..., 1:], weight.unsqueeze(1), bias, groups=channels)
    return (functional.silu(y) if is_activated else y).transpose(1, 2)
