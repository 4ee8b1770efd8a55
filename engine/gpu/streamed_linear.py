"""Linear products with weights of the model's type or of 4 bits, each by the way that was measured to be faster.

A product of few rows takes as long as its weights take to be read. Our kernel does nothing else than read them; the
vendor's library, before which 4 bits have to be turned into numbers, does what computes. Where one overtakes the other
depends on the device and the shape, so both are timed at start, for the model's own shapes.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from engine.gpu.runtime import GpuRuntime
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, dense
from kernels.streamed_linear.launch import counters, from_int4, streamed_linear
from kernels.streamed_linear.reference import Int4Matrix, to_int4

_logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows that are timed; what lies between two goes the way of the larger one."""
MAX_DENSE_ROWS = 16
"""Beyond, weights of the model's type are the library's: it computes."""
TOLERANCE = 0.02
"""Of what the two ways give, of the largest number: a kernel that is wrong on some device is not taken there."""


class StreamedLinear:
    """y = x W^T + b for a fixed W [out, in].

    Args:
        weight: [out, in]; given away.
        bias: [out] or None.
        is_int4: whether the weight has 4 bits or is rounded to them (`kernels.streamed_linear.reference`);
            `engine.resolve` sees to it that its size does.

    Attributes:
        rows: those of `ROWS` that our kernel may be taken for.
        streams: for each of them whether it is.
    """

    def __init__(self, weight: Weight, bias: torch.Tensor | None, *, is_int4: bool = False) -> None:
        self.shape = weight.shape
        self.dtype, self.device = weight.dtype, weight.device
        self.rows = ROWS if is_int4 else tuple(rows for rows in ROWS if rows <= MAX_DENSE_ROWS)
        self.streams = (False,) * len(self.rows)
        if isinstance(weight, Int4Weight):
            self._weight: torch.Tensor | Int4Matrix = weight.packed()
        else:
            self._weight = to_int4(dense(weight)) if is_int4 else dense(weight)
        self._bias = bias
        self._arrived = counters(weight.shape[0], self.rows[-1], weight.device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [rows, in]; returns [rows, out] in the dtype of `x`."""
        index = bisect_left(self.rows, len(x))
        return self.stream(x) if index < len(self.rows) and self.streams[index] else self.multiply(x)

    def stream(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by our kernel, at most `rows[-1]` rows."""
        return streamed_linear(x, self._weight, self._bias, self._arrived)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the library."""
        weight = from_int4(self._weight) if isinstance(self._weight, Int4Matrix) else self._weight
        return functional.linear(x, weight, self._bias)


@torch.inference_mode()
def measure(linears: Sequence[StreamedLinear], runtime: GpuRuntime) -> None:
    """Time both ways for each shape and number of rows, all layers of a shape in turn, and set `streams` by it."""
    for alike in _by_kind(linears):
        shape, numbers = alike[0].shape, alike[0].rows
        streams = tuple(_is_faster(alike, rows, runtime) for rows in numbers)
        for linear in alike:
            linear.streams = streams
        chosen = [rows for rows, is_streamed in zip(numbers, streams, strict=True) if is_streamed]
        _logger.info("products by %s: our kernel for %s rows", tuple(shape), chosen or "no")


@torch.inference_mode()
def stream_each(linears: Sequence[StreamedLinear]) -> None:
    """Launch what `measure` does for one layer of each shape."""
    for linear, *_ in _by_kind(linears):
        for rows in linear.rows:
            x = torch.zeros(rows, linear.shape[1], dtype=linear.dtype, device=linear.device)
            linear.stream(x)
            linear.multiply(x)


def _by_kind(linears: Sequence[StreamedLinear]) -> list[list[StreamedLinear]]:
    """Group products that take the same time; those in float32 are left out: the library's."""
    by_kind: dict[tuple[torch.Size, tuple[int, ...]], list[StreamedLinear]] = {}
    for linear in linears:
        if linear.dtype != torch.float32:
            by_kind.setdefault((linear.shape, linear.rows), []).append(linear)
    return list(by_kind.values())


def _last(products: Iterator[torch.Tensor]) -> torch.Tensor:
    """Make all and keep the last: recordings share their memory, and all at once would be taken from the cache."""
    return deque(products, maxlen=1)[0]


def _is_faster(alike: Sequence[StreamedLinear], rows: int, runtime: GpuRuntime) -> bool:
    first = alike[0]
    x = torch.randn(rows, first.shape[1], dtype=first.dtype, device=runtime.device)
    known_s = runtime.seconds(lambda: _last(linear.multiply(x) for linear in alike))
    if not runtime.seconds(lambda: _last(linear.stream(x) for linear in alike)) < known_s:
        return False
    expected, found = first.multiply(x).float(), first.stream(x).float()
    if bool((found - expected).abs().max() <= TOLERANCE * expected.abs().max()):
        return True
    _logger.error("products by %s of %d rows are wrong by our kernel; the library does them", tuple(first.shape), rows)
    return False
