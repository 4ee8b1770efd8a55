"""A benchmark of one kernel on inputs of one shape, and its measured figures against the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from loadtest.gpu.parts import Attempt
from loadtest.gpu.timing import Ceilings, Timer


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One kernel on inputs of one shape.

    Attributes:
        num_bytes: bytes that it must read and write.
        num_flop, num_fp8_flop: operations that it must compute in matrix products, of bfloat16 and of fp8.
    """

    name: str
    run: Callable[[], object]
    num_bytes: float
    num_flop: float = 0.0
    num_fp8_flop: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Measurements of one kernel; `of_ceiling` is the floor's time divided by the measured time."""

    name: str
    us: float
    gb_per_s: float
    tflop_per_s: float
    of_ceiling: float


def measure(
    found: Iterable[Bench], ceilings: Ceilings, timer: Timer, attempt: Attempt = nullcontext
) -> Iterator[Figure]:
    """Time each benchmark and yield its figure at once."""
    for bench in found:
        with attempt(bench.name):
            seconds = timer.seconds(bench.run)
            yield Figure(
                name=bench.name,
                us=seconds * 1e6,
                gb_per_s=bench.num_bytes / seconds / 1e9,
                tflop_per_s=(bench.num_flop + bench.num_fp8_flop) / seconds / 1e12,
                of_ceiling=ceilings.floor_s(bench.num_bytes, bench.num_flop, bench.num_fp8_flop) / seconds,
            )


def random_numbers(*shape: int, device: torch.device) -> torch.Tensor:
    """Return standard normal numbers, in bfloat16 on a GPU, else float32."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(shape, dtype=dtype, device=device)
