"""Small copies of numbers from the host to a device."""

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
    """Return numbers as a tensor on a device; a copy to a GPU is asynchronous."""
    host = torch.tensor(numbers, dtype=dtype)
    if device.type == "cuda":
        # A copy from pageable memory would wait for everything enqueued before it.
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
