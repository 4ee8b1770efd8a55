"""Linear products with weights of the model's type or of 4 bits, each by the way that was measured to be faster.

A product of few rows takes as long as its weights take to be read. Our kernels do nothing else than read them, one for
a row or two and one for more; the vendor's library, before which 4 bits have to be turned into numbers, does what
computes. Where one overtakes the other depends on the device and the shape, so all are timed at start, for the model's
own shapes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch
from torch.nn import functional

from engine.gpu.runtime import GpuRuntime
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, dense
from kernels.gated_activation.launch import silu_and_multiply
from kernels.streamed_linear.launch import MAX_ROWS, counters, from_int4, row_linear, streamed_linear
from kernels.streamed_linear.reference import Int4Matrix, to_int4

_logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows that are timed; what lies between two goes the way of the larger one."""
MAX_DENSE_ROWS = 16
"""Beyond, weights of the model's type are the library's: it computes."""
TOLERANCE = 0.02
"""Of what two ways give, of the largest number: a kernel that is wrong on some device is not taken there."""


class Way(Enum):
    """Who multiplies."""

    LIBRARY = "the library"
    TILES = "our kernel"
    ROWS = "our kernel of few rows"


class StreamedLinear:
    """y = x W^T + b for a fixed W [out, in].

    Args:
        weight: [out, in]; given away.
        bias: [out] or None.
        is_int4: whether the weight has 4 bits or is rounded to them (`kernels.streamed_linear.reference`);
            `engine.resolve` sees to it that its size does.
        is_gate_up: whether its outputs are [gate | up], mostly to be joined (`gated`).

    Attributes:
        rows: those of `ROWS` that our kernels may be taken for.
        ways: for each of them who is.
    """

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None, *, is_int4: bool = False, is_gate_up: bool = False
    ) -> None:
        self.is_gate_up = is_gate_up
        self.shape = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.rows = ROWS if is_int4 else tuple(rows for rows in ROWS if rows <= MAX_DENSE_ROWS)
        self.ways = (Way.LIBRARY,) * len(self.rows)
        if isinstance(weight, Int4Weight):
            self._weight: torch.Tensor | Int4Matrix = weight.packed()
        else:
            self._weight = to_int4(dense(weight)) if is_int4 else dense(weight)
        self._bias = bias
        self._arrived = counters(weight.shape[0], self.rows[-1], weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [rows, in]; returns [rows, out] in the dtype of `x`."""
        return self.multiply(x, self._way(len(x)))

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [rows, in] by [gate | up] and join them, as `kernels.gated_activation` defines it."""
        return self.gate(x, self._way(len(x)))

    def multiply(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        """Multiply one way, which must be open to so many rows."""
        if way is Way.ROWS:
            assert isinstance(self._weight, torch.Tensor)
            return row_linear(x, self._weight, self._bias)
        if way is Way.TILES:
            return streamed_linear(x, self._weight, self._bias, self._arrived)
        weight = from_int4(self._weight) if isinstance(self._weight, Int4Matrix) else self._weight
        return functional.linear(x, weight, self._bias)

    def gate(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        """Multiply one way and join, by one kernel where that can."""
        if way is Way.ROWS:
            assert isinstance(self._weight, torch.Tensor)
            return row_linear(x, self._weight, self._bias, is_gated=True)
        return silu_and_multiply(self.multiply(x, way))

    def open_ways(self, rows: int) -> list[Way]:
        """Return who can multiply so many rows of `self.rows`."""
        has_rows_way = rows <= MAX_ROWS and isinstance(self._weight, torch.Tensor)
        return [Way.LIBRARY, Way.TILES, *([Way.ROWS] if has_rows_way else [])]

    def _way(self, rows: int) -> Way:
        index = bisect_left(self.rows, rows)
        return self.ways[index] if index < len(self.rows) else Way.LIBRARY


@torch.inference_mode()
def measure(linears: Sequence[StreamedLinear], runtime: GpuRuntime) -> None:
    """Time each way for each shape and number of rows, all layers of a shape in turn, and set `ways` by it."""
    for alike in _by_kind(linears):
        shape, numbers = alike[0].shape, alike[0].rows
        ways = tuple(_fastest(alike, rows, runtime) for rows in numbers)
        for linear in alike:
            linear.ways = ways
        for way in (Way.ROWS, Way.TILES):
            chosen = [rows for rows, taken in zip(numbers, ways, strict=True) if taken is way]
            _logger.info("products by %s: %s for %s rows", tuple(shape), way.value, chosen or "no")


@torch.inference_mode()
def stream_each(linears: Sequence[StreamedLinear]) -> None:
    """Launch what `measure` does for one layer of each shape."""
    for linear, *_ in _by_kind(linears):
        for rows in linear.rows:
            x = torch.zeros(rows, linear.shape[1], dtype=linear.dtype, device=linear.device)
            for way in linear.open_ways(rows):
                linear.multiply(x, way)
                if linear.is_gate_up:
                    linear.gate(x, way)


def _by_kind(linears: Sequence[StreamedLinear]) -> list[list[StreamedLinear]]:
    """Group products that take the same time; those in float32 are left out: the library's."""
    by_kind: dict[tuple[torch.Size, tuple[int, ...], bool], list[StreamedLinear]] = {}
    for linear in linears:
        if linear.dtype != torch.float32:
            by_kind.setdefault((linear.shape, linear.rows, linear.is_gate_up), []).append(linear)
    return list(by_kind.values())


def _last(products: Iterator[torch.Tensor]) -> torch.Tensor:
    """Make all and keep the last: recordings share their memory, and all at once would be taken from the cache."""
    return deque(products, maxlen=1)[0]


def _fastest(alike: Sequence[StreamedLinear], rows: int, runtime: GpuRuntime) -> Way:
    """Return who multiplies so many rows in the least time, and right."""
    first = alike[0]
    x = torch.randn(rows, first.shape[1], dtype=first.dtype, device=runtime.device)

    def run(way: Way) -> Callable[[], torch.Tensor]:
        return lambda: _last(_usual(linear, x, way) for linear in alike)

    for way in sorted(first.open_ways(rows), key=lambda way: runtime.seconds(run(way))):
        if way is Way.LIBRARY or _is_right(first, x, way):
            return way
    raise AssertionError("the library is one of them")


def _usual(linear: StreamedLinear, x: torch.Tensor, way: Way) -> torch.Tensor:
    """Do what a step without adapters does."""
    return linear.gate(x, way) if linear.is_gate_up else linear.multiply(x, way)


def _is_right(linear: StreamedLinear, x: torch.Tensor, way: Way) -> bool:
    expected, found = _usual(linear, x, Way.LIBRARY).float(), _usual(linear, x, way).float()
    if bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max()):
        return True
    shape = tuple(linear.shape)
    _logger.error("products by %s of %d rows are wrong by %s; another way is taken", shape, len(x), way.value)
    return False
