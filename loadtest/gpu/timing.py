"""GPU timing, and the two ceilings that work is compared with: copy bandwidth and matrix product throughput."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from kernels.architecture import has_fp8_products

FLUSH_BYTES = 1 << 30
"""Bytes read before each run: more than any cache holds, and long enough for the host to enqueue the run behind it.
Read, not written: written data would be flushed from the cache to memory during the timed run."""
COPY_BYTES = 4 << 30
MATRIX_SIZE = 8192
NUM_RUNS, NUM_WARM_UPS = 20, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """Measured limits of the device.

    Attributes:
        bytes_per_s: bytes read plus written.
        flop_per_s, fp8_flop_per_s: operations in products of bfloat16, and of fp8; None for a device that has none.
    """

    bytes_per_s: float
    flop_per_s: float
    fp8_flop_per_s: float | None = None

    def floor_s(self, num_bytes: float, num_flop: float, num_fp8_flop: float = 0.0) -> float:
        """Return the minimum time of work that moves and computes this much, `num_fp8_flop` besides `num_flop`."""
        products_s = num_flop / self.flop_per_s + num_fp8_flop / (self.fp8_flop_per_s or self.flop_per_s)
        return max(num_bytes / self.bytes_per_s, products_s)


class Timer(Protocol):
    """Times work."""

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds that a run takes."""
        ...


class GpuTimer:
    """Times work with the device's events.

    Args:
        flush: whether to flush the caches before each run.
    """

    def __init__(self, *, flush: bool = True) -> None:
        self._scratch = torch.zeros(FLUSH_BYTES // 4 if flush else 1, device="cuda")

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of a run, in seconds."""
        for _ in range(NUM_WARM_UPS):
            run()
        pairs = []
        for _ in range(NUM_RUNS):
            self._scratch.sum()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return float(median(start.elapsed_time(end) for start, end in pairs)) / 1000


def measure_ceilings() -> Ceilings:
    """Measure the ceilings: copy a large tensor, and multiply two large random matrices (zeros would be faster)."""
    timer = GpuTimer(flush=False)
    copy_s = timer.seconds(_copy())
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    num_flop = 2 * MATRIX_SIZE**3
    return Ceilings(
        bytes_per_s=2 * COPY_BYTES / copy_s,
        flop_per_s=num_flop / timer.seconds(lambda: a @ b),
        fp8_flop_per_s=num_flop / timer.seconds(_fp8_product(a, b)) if has_fp8_products() else None,
    )


def _fp8_product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    """Return a function that multiplies the matrices in fp8, with one scale each and the fastest accumulation."""
    one, two = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device=a.device)
    return lambda: torch._scaled_mm(
        one, two, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )


def _copy() -> Callable[[], object]:
    """Return a function that copies a tensor; the tensors are large and are freed with it."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
