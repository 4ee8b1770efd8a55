"""Sweep over tile configurations ("cuts") of the kernels that dominate decoding.

The defaults are in `kernels.paged_attention.launch`, `kernels.rope_attention.launch` and
`kernels.streamed_linear.launch`; if a sweep finds a much faster cut on a device, change them there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial

import torch

from kernels.architecture import has_fp8_products
from kernels.paged_attention.launch import Share
from kernels.rope_attention import launch as rope_attention
from kernels.streamed_linear.launch import LinearCut, streamed_linear, tile_cut, to_fp8
from kernels.streamed_linear.reference import Fp8Matrix, Int4Matrix, Matrix, to_int4
from loadtest.gpu.attention import attention_inputs, rope_attention_inputs
from loadtest.gpu.bench import random_numbers
from loadtest.gpu.kernels import SHORT
from loadtest.gpu.parts import Attempt
from loadtest.gpu.sizes import Geometry
from loadtest.gpu.timing import Ceilings, Timer

TOLERANCE = 0.03
"""Maximum difference between the results of two cuts, relative to the largest value."""
MAX_COUNTERS = 1 << 16
SHARES = (
    (16, 64, 2, 4, 5),
    (16, 64, 3, 4, 3),
    (16, 128, 1, 4, 5),
    (8, 32, 4, 2, 5),
    (16, 32, 8, 1, 1),
    (8, 32, 8, 1, 1),
)
"""For rows of one token: queries and keys per tile, programs per multiprocessor, warps, stages."""
ROPE = ((2, 16, 2, 8), (2, 32, 1, 16), (2, 32, 2, 4), (2, 16, 4, 8), (1, 32, 2, 8), (4, 32, 2, 8), (4, 16, 2, 16))
"""For attention fused with the rotary embedding: heads per program, splits, keys per thread, warps."""
DENSE = (
    *((64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)),
    *((128, 128, 8, 3), (32, 128, 4, 4), (32, 256, 4, 3), (16, 256, 4, 4), (128, 64, 8, 8), (256, 64, 8, 5)),
)
INT4 = ((64, 128, 4, 4), (64, 128, 4, 3), (64, 128, 4, 6), (32, 128, 4, 4), (128, 128, 4, 4), (128, 128, 4, 6))
FP8 = (
    *((64, 128, 4, 6), (64, 256, 4, 4), (64, 256, 4, 8), (128, 128, 4, 4), (128, 128, 8, 4), (128, 128, 8, 8)),
    *((128, 256, 8, 4), (256, 128, 8, 3), (256, 128, 8, 5)),
)
"""Outputs and inputs per tile, warps, stages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """One kernel on one input: with its default cut, and with others."""

    name: str
    num_bytes: float
    usual: Callable[[], torch.Tensor]
    others: Sequence[tuple[dict[str, int], Callable[[], torch.Tensor]]]

    @property
    def runs(self) -> list[Callable[[], torch.Tensor]]:
        """The runs of all cuts."""
        return [self.usual, *(run for _, run in self.others)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a sweep: microseconds of the default and the best cut, the best cut, and shares of the ceiling.

    Attributes:
        us_by_cut: time of each other cut; None if its result was wrong or it could not run.
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
    """Yield all sweeps; `scale` divides batch and context for a trial without a GPU."""
    families = [
        _attention(geometry, device, max(1, rows // scale), context // scale)
        for rows, context in ((1, 8192), (64, 4096), (64, 1024))
    ]
    families += [_rope_attention(geometry, device, context // scale) for context in (1024, 8192)]
    families += [_products(geometry, device, max(1, rows // scale)) for rows in (1, 16, 64)]
    families += [_fp8_products(geometry, device, max(1, rows // scale)) for rows in (16, 64)]
    for family in families:
        with attempt("inputs"):
            yield from family


def measure(sweep: Sweep, ceilings: Ceilings, timer: Timer) -> Found:
    """Time every cut whose result is right."""
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


def _rope_attention(geometry: Geometry, device: torch.device, context: int) -> Iterator[Sweep]:
    attend, num_bytes = rope_attention_inputs(geometry, device, rows=1, context=context)
    cuts = [
        rope_attention.AttentionCut(heads=heads, num_splits=splits, depth=depth, num_warps=warps)
        for heads, splits, depth, warps in ROPE
    ]
    yield Sweep(
        name=f"rotate, write and attend, 1 row of {context}",
        num_bytes=num_bytes,
        usual=lambda: attend(rope_attention.USUAL),
        others=[(asdict(cut), partial(attend, cut)) for cut in cuts],
    )


def _products(geometry: Geometry, device: torch.device, rows: int) -> Iterator[Sweep]:
    hidden, inner = geometry.hidden, geometry.inner
    for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        weight = random_numbers(width, depth, device=device)
        yield _product(weight, rows, weight.dtype, DENSE)
        if rows == 1:
            yield _product(to_int4(weight.to(SHORT)), rows, SHORT, INT4)


def _fp8_products(geometry: Geometry, device: torch.device, rows: int) -> Iterator[Sweep]:
    """Yield sweeps of fp8 products; the default uses tiles that are not wide, and a wide cut is among the others."""
    if has_fp8_products():
        hidden, inner = geometry.hidden, geometry.inner
        for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
            wide = tile_cut(rows, width, depth, 1, is_wide=True)
            cuts = {*FP8, (wide.block_n, wide.block_k, wide.num_warps, wide.num_stages)}
            yield _product(to_fp8(random_numbers(width, depth, device=device)), rows, torch.bfloat16, sorted(cuts))


def _product(weight: Matrix, rows: int, dtype: torch.dtype, cuts: Sequence[tuple[int, int, int, int]]) -> Sweep:
    width, depth = weight.shape
    held = weight if isinstance(weight, torch.Tensor) else weight.held
    # The scales: four bytes for each group of 128 weights of four bits.
    unit_bytes = 0 if isinstance(weight, torch.Tensor) else weight.units.nbytes
    x = random_numbers(rows, depth, device=held.device).to(dtype)
    arrived = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=held.device)
    others = []
    for block_n, block_k, num_warps, num_stages in cuts:
        for count in (1, 2, 4, 8):
            cut = LinearCut(
                block_n=block_n, block_k=block_k, num_splits=count, num_warps=num_warps, num_stages=num_stages
            )
            others.append((asdict(cut), lambda cut=cut: streamed_linear(x, weight, None, arrived, cut)))
    kind = "int4" if isinstance(weight, Int4Matrix) else "fp8" if isinstance(weight, Fp8Matrix) else "streamed"
    return Sweep(
        name=f"{kind} product, {rows} rows by {width} x {depth}",
        num_bytes=held.nbytes + unit_bytes + x.nbytes + rows * width * x.element_size(),
        usual=lambda: streamed_linear(x, weight, None, arrived),
        others=others,
    )
