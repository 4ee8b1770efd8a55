"""The kernels of a device for layers that keep states, which replace functions of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

MULTIPLE, MOST_KEYS, MOST_WIDTH = 16, 256, 8
"""What all implementations support: the divisor of widths, the widest key or state, and the widest convolution."""


class StateKernels(NamedTuple):
    """Functions with the arguments of `kernels.gated_delta.launch`, `.causal_conv.launch` and `.selective_scan.launch`.

    Attributes:
        dtypes: which they support, for all arguments and results that are not said to be float32.
    """

    dtypes: frozenset[torch.dtype]
    gated_delta: Callable[..., torch.Tensor]
    causal_conv: Callable[..., torch.Tensor]
    selective_scan: Callable[..., torch.Tensor]
