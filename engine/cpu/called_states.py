"""Our compiled kernels for layers that keep states, each called as needed."""

from __future__ import annotations

import torch

from kernels.gated_delta.reference import EPS
from kernels.native import SUFFIX_BY_DTYPE
from kernels.program import Pool
from kernels.state_rows import StateRows, token_stride


class CalledStates:
    """The `engine.state_kernels.StateKernels` of a CPU; the host always finds the rows' states."""

    dtypes = frozenset(SUFFIX_BY_DTYPE)

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

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
        """As `StateKernels` says."""
        assert rows is None
        out = v.new_empty(v.shape)
        sizes = (*v.shape[1:3], *k.shape[2:], v.shape[3], *(token_stride(x) for x in (q, k, v)))
        numbers = (q, k, v, g, beta, states, out)
        self._pool.call("gated_delta", v.dtype, len(v), numbers, sizes, (EPS, k.shape[3] ** -0.5))
        return out

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
        """As `StateKernels` says."""
        assert rows is None
        y = x.new_empty(x.shape)
        sizes = x.shape[1], *weight.shape, token_stride(x), int(is_activated)
        self._pool.call("causal_conv", x.dtype, len(x), (x, states, weight, bias, y), sizes)
        return y

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
        """As `StateKernels` says."""
        assert rows is None
        y = x.new_empty(x.shape)
        sizes = (*x.shape[1:], *b.shape[2:], *(token_stride(part) for part in (x, b, c)))
        self._pool.call("selective_scan", x.dtype, len(x), (x, dt, a, b, c, d, states, y), sizes)
        return y
