"""Linear products with weights of the model's type, of 8 bits or of 4, each by the way that was measured to be faster.

A product of few rows takes as long as its weights take to be read. Our kernels do nothing else than read them, one for
a row or two and one for more; the vendor's library, before which 4 bits have to be turned into numbers, does what
computes. Where one overtakes the other depends on the device and the shape, so all are timed at start, for the model's
own shapes.

With weights of 8-bit floats inputs are rounded to those too (`kernels.streamed_linear.reference`), save by the kernel
for a row or two, which reads them as they are and saves the launch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch.nn import functional

from engine.gpu.rounding import InputRounding
from engine.gpu.runtime import GpuRuntime
from engine.loading.fp8 import Fp8Weight
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, dense
from engine.progress import Progress
from kernels.add_rms_norm.launch import add_rms_norm
from kernels.row_quantization.launch import Rounded
from kernels.streamed_linear.launch import (
    MAX_ROWS,
    MAX_SWEPT_ROWS,
    MAX_WIDE_ROWS,
    counters,
    from_int4,
    row_linear,
    streamed_linear,
    tile_cut,
    to_fp8,
)
from kernels.streamed_linear.reference import FP8, Fp8Matrix, Int4Matrix, Matrix, to_int4

_logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows that are timed; what lies between two goes the way of the larger one."""
MAX_DENSE_ROWS = 64
"""Beyond, weights of the model's type are the library's: a product computes for longer than it reads."""
EPS = 1e-6
"""Of norms that are timed."""
LARGEST_INPUT = 7.0
"""Of those that are drawn: a 64th of the largest 8-bit float, so that a row's scale is a power of two."""
TOLERANCE = 0.02
"""Of what two ways give, of the largest number: a kernel that is wrong on some device is not taken there."""


class Way(Enum):
    """Who multiplies."""

    LIBRARY = "the library"
    TILES = "our kernel"
    WIDE_TILES = "our kernel by wide tiles"
    ROWS = "our kernel of few rows"


class StreamedLinear:
    """y = x W^T + b for a fixed W [out, in].

    Args:
        weight: [out, in]; given away.
        bias: [out] or None.
        quantization: "fp8" or "int4" where the weight has so many bits or is rounded to them
            (`kernels.streamed_linear.reference`); `engine.resolve` sees to it that its size does.
        is_gate_up: whether its outputs are [gate | up], mostly to be joined (`gated`).
        is_after_norm: whether its inputs come from a norm.
        rounding: where its inputs may lie rounded, and its joined outputs are rounded for the next product.
        out_dtype: of the room that whoever multiplies brings for what comes of it; None where nobody does.

    Attributes:
        rows: those of `ROWS` that our kernels may be taken for.
        ways: for each of them who is.
        normed_rows: numbers of rows that are normed as they are multiplied.
    """

    def __init__(
        self,
        weight: Weight,
        bias: torch.Tensor | None,
        *,
        quantization: str | None = None,
        is_gate_up: bool = False,
        is_after_norm: bool = False,
        rounding: InputRounding | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> None:
        self.is_gate_up = is_gate_up
        self.is_after_norm = is_after_norm
        self.shape = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.out_dtype = out_dtype
        self.rows = ROWS if quantization else tuple(rows for rows in ROWS if rows <= MAX_DENSE_ROWS)
        self.ways = (Way.LIBRARY,) * len(self.rows)
        self.normed_rows: tuple[int, ...] = ()
        self._weight = matrix_of(weight, quantization)
        self._bias = bias
        self._rounding = rounding or InputRounding()
        self._arrived = counters(weight.shape[0], self.rows[-1], weight.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply `x` [rows, in]; returns [rows, out] in the dtype of `x`, or `out`, of any type, filled."""
        return self.multiply(x, self._way(len(x)), out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [rows, in] by [gate | up] and join them by a SiLU, as `kernels.gated_activation` defines it."""
        return self.gate(x, self._way(len(x)))

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Norm some of `normed_rows`, multiply them and join what is [gate | up]."""
        return self._by_rows(x, norm=(weight, eps), is_gated=self.is_gate_up)

    def can_add(self, rows: int) -> bool:
        """Tell whether so many rows go the way that can add to what is there."""
        return self._way(rows) is Way.ROWS

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Multiply and add to `residual` in place, where `can_add` says so."""
        self._by_rows(x, out=residual, is_added=True)

    def multiply(self, x: torch.Tensor, way: Way, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply one way, which must be open to so many rows."""
        if way is Way.ROWS:
            return self._by_rows(x, out=out)
        rounded = self._rounding.take(x) if isinstance(self._weight, Fp8Matrix) else None
        if way is not Way.LIBRARY:
            cut = None
            if way is Way.WIDE_TILES:
                (width, depth), number_bytes = self.shape, x.element_size() if rounded is None else 1
                cut = tile_cut(len(x), width, depth, number_bytes, is_wide=True)
            return streamed_linear(x, self._weight, self._bias, self._arrived, cut, rounded, out)
        if isinstance(self._weight, Fp8Matrix):
            assert rounded is not None
            found = _scaled_linear(rounded, self._weight, self._bias, x.dtype)
        else:
            weight = from_int4(self._weight) if isinstance(self._weight, Int4Matrix) else self._weight
            found = functional.linear(x, weight, self._bias)
        return found if out is None else out.copy_(found)

    def gate(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        """Multiply one way and join, by one kernel where that can."""
        if way is Way.ROWS:
            return self._by_rows(x, is_gated=True)
        return self._rounding.activate_and_multiply(self.multiply(x, way), "silu")

    def open_ways(self, rows: int) -> list[Way]:
        """Return who can multiply so many rows of `self.rows`."""
        open_ways = [Way.LIBRARY, Way.TILES]
        if isinstance(self._weight, Int4Matrix):
            return open_ways
        least = 1 if isinstance(self._weight, Fp8Matrix) else MAX_SWEPT_ROWS + 1
        if least <= rows <= MAX_WIDE_ROWS:
            open_ways.append(Way.WIDE_TILES)
        if rows <= MAX_ROWS:
            open_ways.append(Way.ROWS)
        return open_ways

    def room(self, rows: int) -> torch.Tensor | None:
        """Return what whoever multiplies so many rows brings, None where nobody brings anything."""
        if self.out_dtype is None:
            return None
        return torch.empty(rows, self.shape[0], dtype=self.out_dtype, device=self.device)

    def _by_rows(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        # No way that is open to weights of 4 bits.
        assert not isinstance(self._weight, Int4Matrix)
        return row_linear(x, self._weight, self._bias, **options)

    def _way(self, rows: int) -> Way:
        index = bisect_left(self.rows, rows)
        return self.ways[index] if index < len(self.rows) else Way.LIBRARY


def matrix_of(weight: Weight, quantization: str | None) -> Matrix:
    """Lay a weight out, of which "fp8" and "int4" are as of `StreamedLinear`."""
    if quantization == "fp8":
        return weight.matrix() if isinstance(weight, Fp8Weight) else to_fp8(dense(weight))
    if quantization == "int4":
        return weight.packed() if isinstance(weight, Int4Weight) else to_int4(dense(weight))
    return dense(weight)


def _scaled_linear(x: Rounded, weight: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Multiply by the library's product with a scale for each row of both sides, which makes bfloat16."""
    held, spans = x
    return torch._scaled_mm(
        held,
        weight.held.t(),
        scale_a=spans.unsqueeze(1),
        scale_b=weight.units.unsqueeze(0),
        bias=bias,
        out_dtype=dtype,
    )


@torch.inference_mode()
def measure(linears: Sequence[StreamedLinear], runtime: GpuRuntime) -> None:
    """Time each way for each shape and number of rows, all layers of a shape in turn, and set `ways` by it."""
    kinds = _by_kind(linears)
    progress = Progress("timing products")
    for number, alike in enumerate(kinds, start=1):
        shape, numbers = alike[0].shape, alike[0].rows
        ways = tuple(_fastest(alike, rows, runtime) for rows in numbers)
        for linear in alike:
            linear.ways = ways
        normed_rows = tuple(rows for rows in range(1, MAX_ROWS + 1) if _gains_by_norm(alike, rows, runtime))
        for linear in alike:
            linear.normed_rows = normed_rows
        for way in alike[0].open_ways(numbers[0])[1:]:
            chosen = [rows for rows, taken in zip(numbers, ways, strict=True) if taken is way]
            _logger.info("products by %s: %s for %s rows", tuple(shape), way.value, chosen or "no")
        if normed_rows:
            _logger.info("products by %s: %s are normed on their way", tuple(shape), normed_rows)
        progress.reach(number, len(kinds))


@torch.inference_mode()
def stream_each(linears: Sequence[StreamedLinear]) -> None:
    """Launch what `measure` does for one layer of each shape."""
    for linear, *_ in _by_kind(linears):
        for rows in linear.rows:
            x = torch.zeros(rows, linear.shape[1], dtype=linear.dtype, device=linear.device)
            for way in linear.open_ways(rows):
                linear.multiply(x, way, linear.room(rows))
                if linear.is_gate_up:
                    linear.gate(x, way)
                if way is Way.ROWS and linear.is_after_norm:
                    linear.normed(x, x[0], 0.0)
                elif way is Way.ROWS and linear.out_dtype is None:
                    linear.add_to(x.new_zeros(rows, linear.shape[0]), x)


def _by_kind(linears: Sequence[StreamedLinear]) -> list[list[StreamedLinear]]:
    """Group products that take the same time; those in float32 are left out: the library's."""
    by_kind: dict[tuple[object, ...], list[StreamedLinear]] = {}
    for linear in linears:
        if linear.dtype != torch.float32:
            kind = linear.shape, linear.rows, linear.is_gate_up, linear.is_after_norm, linear.out_dtype
            by_kind.setdefault(kind, []).append(linear)
    return list(by_kind.values())


def _last(products: Iterator[torch.Tensor]) -> torch.Tensor:
    """Make all and keep the last: recordings share their memory, and all at once would be taken from the cache."""
    return deque(products, maxlen=1)[0]


def _fastest(alike: Sequence[StreamedLinear], rows: int, runtime: GpuRuntime) -> Way:
    """Return who multiplies so many rows in the least time, and right."""
    first = alike[0]
    x = _inputs(first, rows, runtime.device)

    def run(way: Way) -> Callable[[], torch.Tensor]:
        return lambda: _last(_usual(linear, x, way) for linear in alike)

    for way in sorted(first.open_ways(rows), key=lambda way: runtime.seconds(run(way))):
        if way is Way.LIBRARY or _is_right(first, x, way):
            return way
    raise AssertionError("the library is one of them")


def _gains_by_norm(alike: Sequence[StreamedLinear], rows: int, runtime: GpuRuntime) -> bool:
    """Tell whether so many rows take less time where they are normed as they are multiplied, not before."""
    first = alike[0]
    if not (first.is_after_norm and first.can_add(rows)):
        return False
    x = _inputs(first, rows, runtime.device)
    # As many as there are layers: one would be at hand by the second of them.
    gains = torch.ones(len(alike), first.shape[1], dtype=first.dtype, device=runtime.device)

    def apart() -> torch.Tensor:
        return _last(
            _usual(linear, add_rms_norm(x, None, gain, EPS), Way.ROWS)
            for linear, gain in zip(alike, gains, strict=True)
        )

    def at_once() -> torch.Tensor:
        return _last(linear.normed(x, gain, EPS) for linear, gain in zip(alike, gains, strict=True))

    if runtime.seconds(at_once) > runtime.seconds(apart):
        return False
    expected = _usual(first, add_rms_norm(x, None, gains[0], EPS), Way.LIBRARY)
    return _is_near(first.normed(x, gains[0], EPS), expected, first, "norm and product")


def _inputs(linear: StreamedLinear, rows: int, device: torch.device) -> torch.Tensor:
    """Draw inputs that 8-bit floats hold as they are: whether a way rounds them makes no difference."""
    x = torch.randn(rows, linear.shape[1], device=device).clamp(-LARGEST_INPUT, LARGEST_INPUT)
    x[:, 0] = LARGEST_INPUT
    return x.to(FP8).to(linear.dtype)


def _usual(linear: StreamedLinear, x: torch.Tensor, way: Way) -> torch.Tensor:
    """Do what a step without adapters does."""
    return linear.gate(x, way) if linear.is_gate_up else linear.multiply(x, way, linear.room(len(x)))


def _is_right(linear: StreamedLinear, x: torch.Tensor, way: Way) -> bool:
    return _is_near(_usual(linear, x, way), _usual(linear, x, Way.LIBRARY), linear, way.value)


def _is_near(found: torch.Tensor, expected: torch.Tensor, linear: StreamedLinear, what: str) -> bool:
    if bool((found.float() - expected.float()).abs().max() <= TOLERANCE * expected.float().abs().max()):
        return True
    _logger.error("products by %s of %d rows are wrong by %s; it is not taken", tuple(linear.shape), len(found), what)
    return False
