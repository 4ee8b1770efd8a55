"""Stand-ins that make a `HostCache` a matter of steps: weights of any size, and loads that run when told to."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from adapters.weights import AdapterWeights


class Sized(AdapterWeights):
    """Weights of any size, which count how often they are asked for it."""

    def __init__(self, size: int) -> None:
        super().__init__({}, torch.float32)
        self.size = size
        self.num_asked = 0

    @property
    def num_bytes(self) -> int:
        self.num_asked += 1
        return self.size


class Later(ThreadPoolExecutor):
    """Keeps the jobs that are submitted, for the test to run them."""

    def __init__(self) -> None:
        super().__init__(max_workers=1)
        self.jobs: list[Callable[[], object]] = []

    def submit(self, job: Any, /, *args: Any, **options: Any) -> Any:
        self.jobs.append(lambda: job(*args, **options))
