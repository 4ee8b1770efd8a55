"""Linear products with weights of the model's dtype, of 8 bits or of 4, each by the kernel that was measured fastest.

A product of few rows is bound by reading its weights. Our kernels, one for a row or two and one for more, are built for
that; the vendor's library, which needs 4-bit weights dequantized first, is for compute-bound products. The crossover
depends on device and shape, so all are timed at start, for the model's own shapes.

With 8-bit float weights, inputs are quantized to 8-bit floats too (`kernels.streamed_linear.reference`), except by the
kernel for a row or two, which reads them as they are and saves the launch.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch.nn import functional
from triton.errors import TritonError

from engine.gpu.progress import Progress
from engine.gpu.rounding import InputRounding
from engine.gpu.runtime import CudaRuntime
from engine.loading.fp8 import Fp8Weight
from engine.loading.int4 import Int4Weight
from engine.loading.weight import Weight, dense
from kernels.add_rms_norm.launch import add_rms_norm
from kernels.row_quantization.launch import Rounded
from kernels.streamed_linear.launch import (
    BLOCK_N,
    MAX_ROWS,
    MAX_SWEPT_ROWS,
    MAX_WIDE_INT4_ROWS,
    MAX_WIDE_ROWS,
    counters,
    from_int4,
    row_linear,
    streamed_linear,
    to_fp8,
    wide_cut,
)
from kernels.streamed_linear.reference import FP8, Fp8Matrix, Int4Matrix, Matrix, to_int4

_logger = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Row counts that are timed; a count between two uses the result of the larger one."""
MAX_DENSE_ROWS = 64
"""Above this, unquantized weights are left to the library: the product is compute-bound."""
EPS = 1e-6
"""Epsilon of the timed norms."""
LARGEST_INPUT = 7.0
"""Largest random input: a 64th of the largest 8-bit float, so that a row's scale is a power of two."""
TOLERANCE = 0.02
"""Allowed difference of two results, relative to the largest value: a kernel that is wrong on a device is not used."""
WIDENS = torch.version.hip is None and "dtype_out" in torch.ops.aten.mm.overloads()
"""Whether the library multiplies 16-bit matrices into float32, as our kernels do."""
FUSED = "norm and product at once"
"""What messages call the kernel of both."""


class Way(Enum):
    """The kernel that computes a product."""

    LIBRARY = "the library"
    TILES = "our kernel"
    WIDE_TILES = "our kernel by wide tiles"
    ROWS = "our kernel of few rows"


class StreamedLinear:
    """y = x W^T + b for a fixed W [out, in].

    Args:
        weight: [out, in]; the caller gives up ownership.
        bias: [out] or None.
        quantization: "fp8" or "int4" if the weight is stored so or is to be quantized so
            (`kernels.streamed_linear.reference`); `engine.resolve` ensures that its shape fits.
        is_gate_up: whether its outputs are [gate | up], usually combined by `gated`.
        is_after_norm: whether its inputs come from a norm.
        rounding: may hold its inputs already quantized; quantizes its gated outputs for the next product.
        out_dtype: dtype of the output buffer that callers pass; None if they pass none.

    Attributes:
        rows: those of `ROWS` for which our kernels may be chosen.
        ways: the kernel chosen for each of `rows`.
        normed_rows: row counts for which the norm is fused into the product.
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
        """Multiply `x` [rows, in]; returns [rows, out] in the dtype of `x`, or `out`, of any dtype, filled."""
        return self.multiply(x, self._way(len(x)), out)

    def gated(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply `x` [rows, in] by [gate | up] and combine them with SiLU, as `kernels.gated_activation` defines."""
        return self.gate(x, self._way(len(x)))

    def normed(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Norm and multiply `x`, whose row count is one of `normed_rows`; combine outputs that are [gate | up]."""
        return self._by_rows(x, norm=(weight, eps), is_gated=self.is_gate_up)

    def can_add(self, rows: int) -> bool:
        """Return whether this many rows use the kernel that can add to its output."""
        return self._way(rows) is Way.ROWS

    def add_to(self, residual: torch.Tensor, x: torch.Tensor) -> None:
        """Multiply and add to `residual` in place; only if `can_add`."""
        self._by_rows(x, out=residual, is_added=True)

    def multiply(self, x: torch.Tensor, way: Way, out: torch.Tensor | None = None) -> torch.Tensor:
        """Multiply by the given kernel, which must be one of `open_ways` for this many rows."""
        if way is Way.ROWS:
            return self._by_rows(x, out=out)
        rounded = self._rounding.take(x) if isinstance(self._weight, Fp8Matrix) else None
        if way is not Way.LIBRARY:
            cut = wide_cut(x, self._weight) if way is Way.WIDE_TILES else None
            return streamed_linear(x, self._weight, self._bias, self._arrived, cut, rounded, out)
        if isinstance(self._weight, Fp8Matrix):
            assert rounded is not None
            found = _scaled_linear(rounded, self._weight, self._bias, x.dtype)
        else:
            weight = from_int4(self._weight) if isinstance(self._weight, Int4Matrix) else self._weight
            if out is not None and self._is_widened(x, out):
                # Rounded first, a row's results would depend on how many rows there are.
                return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
            found = functional.linear(x, weight, self._bias)
        return found if out is None else out.copy_(found)

    def _is_widened(self, x: torch.Tensor, out: torch.Tensor) -> bool:
        """Return whether the library can write this product to `out` unrounded."""
        return WIDENS and x.is_cuda and self._bias is None and x.dtype != out.dtype == torch.float32

    def gate(self, x: torch.Tensor, way: Way) -> torch.Tensor:
        """Multiply by the given kernel and combine gate and up, fused if the kernel can."""
        if way is Way.ROWS:
            return self._by_rows(x, is_gated=True)
        return self._rounding.activate_and_multiply(self.multiply(x, way), "silu")

    def open_ways(self, rows: int) -> list[Way]:
        """Return the kernels that can multiply this many rows, one of `self.rows`."""
        open_ways, is_int4 = [Way.LIBRARY, Way.TILES], isinstance(self._weight, Int4Matrix)
        least = MAX_SWEPT_ROWS + 1 if isinstance(self._weight, torch.Tensor) else 1
        # A narrow tile has all of a router's outputs.
        if self.shape[0] > BLOCK_N and least <= rows <= (MAX_WIDE_INT4_ROWS if is_int4 else MAX_WIDE_ROWS):
            open_ways.append(Way.WIDE_TILES)
        if rows <= MAX_ROWS and not is_int4:
            open_ways.append(Way.ROWS)
        return open_ways

    def room(self, rows: int) -> torch.Tensor | None:
        """Return an output buffer like that of callers with this many rows, None if they pass none."""
        if self.out_dtype is None:
            return None
        return torch.empty(rows, self.shape[0], dtype=self.out_dtype, device=self.device)

    def _by_rows(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        # Not one of `open_ways` for 4-bit weights.
        assert not isinstance(self._weight, Int4Matrix)
        return row_linear(x, self._weight, self._bias, **options)

    def _way(self, rows: int) -> Way:
        index = bisect_left(self.rows, rows)
        return self.ways[index] if index < len(self.rows) else Way.LIBRARY


def matrix_of(weight: Weight, quantization: str | None) -> Matrix:
    """Lay out a weight; `quantization` is that of `StreamedLinear`."""
    if quantization == "fp8":
        return weight.matrix() if isinstance(weight, Fp8Weight) else to_fp8(dense(weight))
    if quantization == "int4":
        return weight.packed() if isinstance(weight, Int4Weight) else to_int4(dense(weight))
    return dense(weight)


def _scaled_linear(x: Rounded, weight: Fp8Matrix, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """Multiply by the library's product with a scale for each row of both operands, whose result is bfloat16."""
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
def measure(linears: Sequence[StreamedLinear], runtime: CudaRuntime) -> None:
    """Time each kernel for each shape and row count, over all layers of the shape in turn; set `ways` accordingly."""
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
            _logger.info("products of %s: %s for %s rows", tuple(shape), way.value, chosen or "no")
        if normed_rows:
            _logger.info("products of %s: the norm is fused for %s rows", tuple(shape), normed_rows)
        progress.reach(number, len(kinds))


@torch.inference_mode()
def stream_each(linears: Sequence[StreamedLinear]) -> None:
    """Launch everything that `measure` launches, for one layer of each shape."""
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
    """Group products that take the same time; those in float32 are left out, as the library computes them."""
    by_kind: dict[tuple[object, ...], list[StreamedLinear]] = {}
    for linear in linears:
        if linear.dtype != torch.float32:
            kind = linear.shape, linear.rows, linear.is_gate_up, linear.is_after_norm, linear.out_dtype
            by_kind.setdefault(kind, []).append(linear)
    return list(by_kind.values())


def _last(products: Iterator[torch.Tensor]) -> torch.Tensor:
    """Run all and keep only the last result: a recording that holds all at once would take memory from the KV cache."""
    return deque(products, maxlen=1)[0]


def _fastest(alike: Sequence[StreamedLinear], rows: int, runtime: CudaRuntime) -> Way:
    """Return the fastest kernel for this many rows whose result is right."""
    first = alike[0]
    x = _inputs(first, rows, runtime.device)

    def run(way: Way) -> Callable[[], torch.Tensor]:
        return lambda: _last(_usual(linear, x, way) for linear in alike)

    def seconds(way: Way) -> float:
        return runtime.seconds(run(way)) if way is Way.LIBRARY else _seconds(run(way), runtime, first, rows, way.value)

    for way in sorted(first.open_ways(rows), key=seconds):
        if way is Way.LIBRARY or _is_right(first, x, way):
            return way
    raise AssertionError("the library is one of them")


def _seconds(
    run: Callable[[], torch.Tensor], runtime: CudaRuntime, linear: StreamedLinear, rows: int, what: str
) -> float:
    """Return the time of our own kernels; if the device refuses one, forever, so that it is not used."""
    try:
        return runtime.seconds(run)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TritonError) as error:
        _logger.error("products of %s with %d rows are not computed by %s: %s", tuple(linear.shape), rows, what, error)
        return math.inf


def _gains_by_norm(alike: Sequence[StreamedLinear], rows: int, runtime: CudaRuntime) -> bool:
    """Return whether this many rows take less time with the norm fused into the product."""
    first = alike[0]
    if not (first.is_after_norm and first.can_add(rows)):
        return False
    x = _inputs(first, rows, runtime.device)
    # One per layer: a single one would be in the GPU's cache from the second layer on.
    gains = torch.ones(len(alike), first.shape[1], dtype=first.dtype, device=runtime.device)

    def apart() -> torch.Tensor:
        return _last(
            _usual(linear, add_rms_norm(x, None, gain, EPS), Way.ROWS)
            for linear, gain in zip(alike, gains, strict=True)
        )

    def at_once() -> torch.Tensor:
        return _last(linear.normed(x, gain, EPS) for linear, gain in zip(alike, gains, strict=True))

    if _seconds(at_once, runtime, first, rows, FUSED) > runtime.seconds(apart):
        return False
    expected = _usual(first, add_rms_norm(x, None, gains[0], EPS), Way.LIBRARY)
    return _is_near(first.normed(x, gains[0], EPS), expected, first, FUSED)


def _inputs(linear: StreamedLinear, rows: int, device: torch.device) -> torch.Tensor:
    """Draw inputs that 8-bit floats represent exactly, so that it does not matter whether a kernel quantizes them."""
    x = torch.randn(rows, linear.shape[1], device=device).clamp(-LARGEST_INPUT, LARGEST_INPUT)
    x[:, 0] = LARGEST_INPUT
    return x.to(FP8).to(linear.dtype)


def _usual(linear: StreamedLinear, x: torch.Tensor, way: Way) -> torch.Tensor:
    """Compute the product as a step without adapters does."""
    return linear.gate(x, way) if linear.is_gate_up else linear.multiply(x, way, linear.room(len(x)))


def _is_right(linear: StreamedLinear, x: torch.Tensor, way: Way) -> bool:
    return _is_near(_usual(linear, x, way), _usual(linear, x, Way.LIBRARY), linear, way.value)


def _is_near(found: torch.Tensor, expected: torch.Tensor, linear: StreamedLinear, what: str) -> bool:
    if bool((found.float() - expected.float()).abs().max() <= TOLERANCE * expected.float().abs().max()):
        return True
    _logger.error(
        "products of %s with %d rows are wrong by %s, which is not used", tuple(linear.shape), len(found), what
    )
    return False
