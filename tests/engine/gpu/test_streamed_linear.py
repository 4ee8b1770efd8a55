"""Which way a product goes: the one that was measured to be faster, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.gpu import streamed_linear
from engine.gpu.streamed_linear import ROWS, StreamedLinear, measure
from kernels.streamed_linear.reference import from_int4, to_int4
from tests.engine.gpu.host_runtime import HostRuntime
from tests.kernels.gpu.conftest import DEVICE

WEIGHT = torch.randn(48, 128, dtype=torch.float16, device=DEVICE)


class Timed(HostRuntime):
    """By its clock our kernel is faster where it multiplies some numbers of rows."""

    device = DEVICE

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fast: set[int]) -> None:
        super().__init__()
        self._fast = fast
        self._streamed: list[int] = []
        self.product = streamed_linear.streamed_linear
        monkeypatch.setattr(streamed_linear, "streamed_linear", self._note)

    def _note(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        self._streamed.append(len(x))
        return self.product(x, *rest)

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        self._streamed.clear()
        run()
        return 2.0 if not self._streamed else 1.0 if self._streamed[0] in self._fast else 3.0


@pytest.mark.parametrize("is_int4", [False, True])
def test_each_number_of_rows_goes_the_faster_way(monkeypatch: pytest.MonkeyPatch, is_int4: bool) -> None:
    linear = StreamedLinear(WEIGHT, None, is_int4=is_int4)
    assert linear.rows == (ROWS if is_int4 else ROWS[:5])
    runtime = Timed(monkeypatch, fast={2, 4, 16})
    measure([linear], runtime)
    monkeypatch.setattr(linear, "multiply", lambda x: x)
    ways = {
        rows: linear(torch.ones(rows, 128, dtype=torch.float16, device=DEVICE)).shape[1] == 48
        for rows in (1, 2, 3, 4, 5, 16, 99)
    }
    assert ways == {1: False, 2: True, 3: True, 4: True, 5: False, 16: True, 99: False}


def test_both_ways_multiply_by_the_same_weights() -> None:
    bias, x = WEIGHT[0].repeat(2)[:48], WEIGHT[1:4] + 1
    for is_int4 in (False, True):
        linear = StreamedLinear(WEIGHT, bias, is_int4=is_int4)
        expected = x.double() @ (from_int4(to_int4(WEIGHT)) if is_int4 else WEIGHT).double().T + bias
        for way in (linear, linear.stream, linear.multiply):
            torch.testing.assert_close(way(x).double(), expected, atol=0.03, rtol=1e-3)


def test_a_kernel_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Timed(monkeypatch, fast={1, 2})
    right = runtime.product
    monkeypatch.setattr(runtime, "product", lambda x, *rest: right(x, *rest) * (torch.nan if len(x) == 2 else 1))
    linear = StreamedLinear(WEIGHT, None)
    measure([linear], runtime)
    assert linear.streams == (True, False, False, False, False)


def test_what_is_not_measured_is_the_librarys() -> None:
    linears = [StreamedLinear(WEIGHT, None), StreamedLinear(WEIGHT.float(), None)]
    measure(linears, HostRuntime())
    assert not any(any(linear.streams) for linear in linears)
