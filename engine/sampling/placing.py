"""A few numbers on their way from the host to where logits are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

Numbers = (
    Sequence[int]
    | Sequence[float]
    | Sequence[Sequence[int]]
    | Sequence[tuple[int, int]]
    | NDArray[np.int64 | np.float64 | np.bool_]
)


def placed(numbers: Numbers, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Return numbers as a tensor on a device; a GPU that is at work takes them when it comes to them, unwaited for."""
    host = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        # From ordinary memory a copy would wait for all that has been enqueued before it.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
