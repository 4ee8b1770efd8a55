"""Other ways to cut the kernels that decoding waits for, tried one after the other: is a better one known?

What is chosen by default stands in `kernels.paged_attention.launch` and `kernels.streamed_linear.launch`; where a sweep
finds another cut a good deal faster on a device, that is where it goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

from kernels.launches import Geometry
from kernels.paged_attention.launch import Share
from kernels.streamed_linear.launch import Cut, streamed_linear
from kernels.streamed_linear.reference import to_int4
from loadtest.gpu.attention import attention_inputs
from loadtest.gpu.bench import random_numbers
from loadtest.gpu.kernels import SHORT
from loadtest.gpu.parts import Attempt
from loadtest.gpu.timing import Ceilings, Timer

TOLERANCE = 0.03
"""Of the largest number, between two cuts."""
MAX_COUNTERS = 1 << 16
SHARES = (
    (16, 64, 2, 4, 5),
    (16, 64, 3, 4, 3),
    (16, 128, 1, 4, 5),
    (8, 32, 4, 2, 5),
    (16, 32, 8, 1, 1),
    (8, 32, 8, 1, 1),
)
"""Queries, keys, programs of a multiprocessor, warps and stages of rows of one token."""
DENSE = (
    *((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)),
    *((128, 128, 8, 3), (32, 128, 4, 4), (32, 256, 4, 3), (16, 256, 4, 4)),
)
INT4 = ((64, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 6), (32, 128, 4, 4), (32, 128, 2, 6), (128, 128, 8, 4))
"""Outputs, inputs, warps and stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One kernel on one input: as it is cut by default, and in other ways."""

    name: str
    num_bytes: float
    usual: Callable[[], torch.Tensor]
    others: Sequence[tuple[dict[str, int], Callable[[], torch.Tensor]]]

    @property
    def runs(self) -> list[Callable[[], torch.Tensor]]:
        """All ways."""
        return [self.usual, *(run for _, run in self.others)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a sweep found: microseconds, as it is and at best, and with what; shares of the ceiling.

    Attributes:
        us_by_cut: of each way that gave the usual numbers, None for one that did not, or could not be run.
    """

    name: str
    usual_us: float
    best_us: float
    best: str
    usual_of_ceiling: float
    best_of_ceiling: float
    us_by_cut: dict[str, float | None]


def sweeps(
    geometry: Geometry, device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext
) -> Iterator[Sweep]:
    """Yield what is tried; `scale` divides batch and context for a trial without a GPU."""
    families = [
        _attention(geometry, device, max(1, rows // scale), context // scale)
        for rows, context in ((1, 8192), (64, 4096), (64, 1024))
    ]
    families += [_products(geometry, device, rows) for rows in (1, 16)]
    for family in families:
        with attempt("inputs"):
            yield from family


def measure(sweep: Sweep, ceilings: Ceilings, timer: Timer) -> Found:
    """Time every way that is right."""
    expected = sweep.usual().float()
    usual_s = timer.seconds(sweep.usual)
    seconds_by_cut: dict[str, float | None] = {}
    for cut, run in sweep.others:
        name = " ".join(f"{key}={value}" for key, value in cut.items())
        seconds_by_cut[name] = timer.seconds(run) if _is_right(run, expected) else None
    best, best_s = min(
        (("as it is", usual_s), *((name, took) for name, took in seconds_by_cut.items() if took is not None)),
        key=lambda pair: pair[1],
    )
    floor_s = ceilings.floor_s(sweep.num_bytes, 0)
    return Found(
        name=sweep.name,
        usual_us=usual_s * 1e6,
        best_us=best_s * 1e6,
        best=best,
        usual_of_ceiling=floor_s / usual_s,
        best_of_ceiling=floor_s / best_s,
        us_by_cut={name: took and took * 1e6 for name, took in seconds_by_cut.items()},
    )


def _is_right(run: Callable[[], torch.Tensor], expected: torch.Tensor) -> bool:
    try:
        found = run().float()
    except Exception as error:  # noqa: BLE001 - a cut that a device has no room for is an answer too
        print(f"  {type(error).__name__}: {error}".splitlines()[0])
        return False
    return bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max())


def _attention(geometry: Geometry, device: torch.device, rows: int, context: int) -> Iterator[Sweep]:
    attend, num_bytes = attention_inputs(geometry, device, rows=rows, context=context)
    others = []
    for least_m, block_n, programs, warps, stages in SHARES:
        cut = Share(least_m=least_m, block_n=block_n, per_multiprocessor=programs, num_warps=warps, num_stages=stages)
        others.append((asdict(cut), lambda cut=cut: attend(cut)))
    yield Sweep(
        name=f"decode attention, {rows} rows of {context}",
        num_bytes=num_bytes,
        usual=lambda: attend(None),
        others=others,
    )


def _products(geometry: Geometry, device: torch.device, rows: int) -> Iterator[Sweep]:
    hidden, inner = geometry.hidden, geometry.inner
    for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        weight = random_numbers(width, depth, device=device)
        yield _product(weight, rows, is_int4=False)
        if rows == 1:
            yield _product(weight.to(SHORT), rows, is_int4=True)


def _product(weight: torch.Tensor, rows: int, *, is_int4: bool) -> Sweep:
    width, depth = weight.shape
    x = random_numbers(rows, depth, device=weight.device).to(weight.dtype)
    held = to_int4(weight) if is_int4 else weight
    arrived = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=weight.device)
    others = []
    for block_n, block_k, num_warps, num_stages in INT4 if is_int4 else DENSE:
        for count in (1, 2, 4, 8):
            cut = Cut(block_n=block_n, block_k=block_k, num_splits=count, num_warps=num_warps, num_stages=num_stages)
            others.append((asdict(cut), lambda cut=cut: streamed_linear(x, held, None, arrived, cut)))
    num_bytes = weight.nbytes / (4 if is_int4 else 1) + x.nbytes + rows * width * x.element_size()
    return Sweep(
        name=f"{'int4' if is_int4 else 'streamed'} product, {rows} rows by {width} x {depth}",
        num_bytes=num_bytes,
        usual=lambda: streamed_linear(x, held, None, arrived),
        others=others,
    )
