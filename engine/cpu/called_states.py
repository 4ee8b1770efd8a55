"""Our compiled kernels for layers that keep states, each called as needed; the host always finds the rows' states."""

from __future__ import annotations

from functools import partial

import torch

from engine.state_kernels import StateKernels
from kernels.gated_delta.reference import EPS
from kernels.native import SUFFIX_BY_DTYPE
from kernels.program import Pool
from kernels.state_rows import StateRows, token_stride


def called_states(pool: Pool) -> StateKernels:
    """Return the kernels, which run on a pool of threads."""
    functions = (partial(function, pool) for function in (_gated_delta, _causal_conv, _selective_scan))
    return StateKernels(frozenset(SUFFIX_BY_DTYPE), *functions)


def _gated_delta(
    pool: Pool,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    assert rows is None
    out = v.new_empty(v.shape)
    sizes = (*v.shape[1:3], *k.shape[2:], v.shape[3], *(token_stride(x) for x in (q, k, v)))
    pool.call("gated_delta", v.dtype, len(v), (q, k, v, g, beta, states, out), sizes, (EPS, k.shape[3] ** -0.5))
    return out


def _causal_conv(
    pool: Pool,
    x: torch.Tensor,
    states: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: StateRows | None = None,
    *,
    is_activated: bool = True,
) -> torch.Tensor:
    assert rows is None
    y = x.new_empty(x.shape)
    sizes = x.shape[1], *weight.shape, token_stride(x), int(is_activated)
    pool.call("causal_conv", x.dtype, len(x), (x, states, weight, bias, y), sizes)
    return y


def _selective_scan(
    pool: Pool,
    x: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    d: torch.Tensor | None,
    states: torch.Tensor,
    rows: StateRows | None = None,
) -> torch.Tensor:
    assert rows is None
    y = x.new_empty(x.shape)
    sizes = (*x.shape[1:], *b.shape[2:], *(token_stride(part) for part in (x, b, c)))
    pool.call("selective_scan", x.dtype, len(x), (x, dt, a, b, c, d, states, y), sizes)
    return y
