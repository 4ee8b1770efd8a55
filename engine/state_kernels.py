"""The interface of the kernels for layers that keep states, which replace functions of transformers."""

from __future__ import annotations

from typing import Protocol

import torch

from kernels.state_rows import StateRows

MULTIPLE, MOST_KEYS, MOST_WIDTH = 16, 256, 8
"""What all implementations support: the divisor of widths, the widest key or state, and the widest convolution."""


class StateKernels(Protocol):
    """Kernels of one device. Tokens of arguments are contiguous, with one stride between all of them.

    Attributes:
        dtypes: which they support, for all arguments and results that are not said to be float32.
    """

    dtypes: frozenset[torch.dtype]

    def gated_delta(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        states: torch.Tensor,
        rows: StateRows | None = None,
    ) -> torch.Tensor:
        """Compute `kernels.gated_delta.reference`, whose dimensions are multiples of `MULTIPLE`.

        Args:
            g, beta: float32 and contiguous.
            states: float32 and contiguous.
            rows: for rows of one token, which of `states` are theirs; None: row i's are `states[i]`.
        """
        ...

    def causal_conv(
        self,
        x: torch.Tensor,
        states: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        rows: StateRows | None = None,
        *,
        is_activated: bool = True,
    ) -> torch.Tensor:
        """Compute `kernels.causal_conv.reference` of contiguous states and weights.

        Args:
            states: only for rows of one token; None for zeros that are not kept.
            rows: as in `gated_delta`.
        """
        ...

    def selective_scan(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        d: torch.Tensor | None,
        states: torch.Tensor,
        rows: StateRows | None = None,
    ) -> torch.Tensor:
        """Compute `kernels.selective_scan.reference`, whose dimensions are multiples of `MULTIPLE`.

        Args:
            dt, a, d: float32 and contiguous.
            states, rows: as in `gated_delta`.
        """
        ...
