"""Our GPU kernels for layers that keep states."""

from __future__ import annotations

import torch

from kernels.causal_conv.launch import causal_conv
from kernels.gated_delta.launch import gated_delta
from kernels.selective_scan.launch import selective_scan


class TritonStates:
    """The `engine.state_kernels.StateKernels` of a GPU."""

    dtypes = frozenset({torch.float32, torch.bfloat16, torch.float16})
    gated_delta = staticmethod(gated_delta)
    causal_conv = staticmethod(causal_conv)
    selective_scan = staticmethod(selective_scan)
