"""Which way a product goes: the one that was measured to be the fastest, and right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.gpu.streamed_linear import ROWS, StreamedLinear, Way, measure
from kernels.gated_activation.reference import silu_and_multiply
from kernels.streamed_linear.launch import MAX_ROWS
from kernels.streamed_linear.reference import from_int4, to_int4
from tests.engine.gpu.host_runtime import HostRuntime
from tests.kernels.gpu.conftest import DEVICE

WEIGHT = torch.randn(48, 128, dtype=torch.float16, device=DEVICE)


class Timed(HostRuntime):
    """By its clock a way takes what a table says of it and a number of rows, 2 where it says nothing."""

    device = DEVICE

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[tuple[Way, int], float]) -> None:
        super().__init__()
        self._times = times
        self._last = Way.LIBRARY, 0
        for name in ("multiply", "gate"):
            monkeypatch.setattr(StreamedLinear, name, self._noted(getattr(StreamedLinear, name)))

    def _noted(self, run: Callable[[StreamedLinear, torch.Tensor, Way], torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(linear: StreamedLinear, x: torch.Tensor, way: Way) -> torch.Tensor:
            self._last = way, len(x)
            return run(linear, x, way)

        return noted

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        run()
        return self._times.get(self._last, 2.0)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_each_number_of_rows_goes_the_fastest_way(monkeypatch: pytest.MonkeyPatch, quantization: str | None) -> None:
    linear = StreamedLinear(WEIGHT, None, quantization=quantization)
    assert linear.rows == (ROWS if quantization else ROWS[:7])
    times = {(Way.TILES, rows): 1.0 for rows in (2, 4, 16)} | {(Way.ROWS, 1): 1.0, (Way.ROWS, 2): 1.5}
    measure([linear], Timed(monkeypatch, times))
    one = Way.LIBRARY if quantization else Way.ROWS
    assert linear.ways[:5] == (one, Way.TILES, Way.TILES, Way.LIBRARY, Way.TILES)
    taken: list[Way] = []
    monkeypatch.setattr(linear, "multiply", lambda _, way, *_out: taken.append(way))
    for rows in (1, 2, 3, 4, 5, 16, 999):
        linear(torch.ones(rows, 128, dtype=torch.float16, device=DEVICE))
    assert taken == [one, *[Way.TILES] * 3, Way.LIBRARY, Way.TILES, Way.LIBRARY]


def test_a_gated_product_is_measured_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, other = StreamedLinear(WEIGHT, None, is_gate_up=True), StreamedLinear(WEIGHT, None)
    measure([linear, other], Timed(monkeypatch, {(Way.ROWS, 1): 1.0}))
    taken: list[Way] = []
    monkeypatch.setattr(linear, "gate", lambda _, way: taken.append(way))
    linear.gated(WEIGHT[:1])
    linear.gated(WEIGHT[:9])
    assert taken == [Way.ROWS, Way.LIBRARY]


def test_all_ways_multiply_by_the_same_weights() -> None:
    bias, x = WEIGHT[0].repeat(2)[:48], WEIGHT[1:3] + 1
    for quantization in (None, "int4"):
        linear = StreamedLinear(WEIGHT, bias, quantization=quantization)
        whole = from_int4(to_int4(WEIGHT)) if quantization else WEIGHT
        expected = x.double() @ whole.double().T + bias
        ways = linear.open_ways(len(x))
        assert ways == [Way.LIBRARY, Way.TILES] + ([] if quantization else [Way.ROWS])
        for way in ways:
            torch.testing.assert_close(linear.multiply(x, way).double(), expected, atol=0.03, rtol=1e-3)
            torch.testing.assert_close(linear.gate(x, way).double(), silu_and_multiply(expected), atol=0.1, rtol=5e-3)
    dense = StreamedLinear(WEIGHT, None)
    assert dense.open_ways(MAX_ROWS + 1) == [Way.LIBRARY, Way.TILES]
    assert dense.open_ways(64) == [Way.LIBRARY, Way.TILES, Way.WIDE_TILES]
    x = WEIGHT[:40]
    for way in dense.open_ways(40):
        expected = x.double() @ WEIGHT.double().T
        torch.testing.assert_close(dense.multiply(x, way).double(), expected, atol=0.1, rtol=2e-3)


def test_a_kernel_that_is_wrong_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Timed(monkeypatch, {(Way.TILES, 1): 1.0, (Way.TILES, 2): 1.0})
    right = StreamedLinear.multiply

    def wrong(linear: StreamedLinear, x: torch.Tensor, way: Way) -> torch.Tensor:
        return right(linear, x, way) * (torch.nan if (way, len(x)) == (Way.TILES, 2) else 1)

    monkeypatch.setattr(StreamedLinear, "multiply", wrong)
    linear = StreamedLinear(WEIGHT, None)
    measure([linear], runtime)
    assert linear.ways == (Way.TILES, *[Way.LIBRARY] * 6)


def test_what_is_not_measured_is_the_librarys() -> None:
    linears = [StreamedLinear(WEIGHT, None), StreamedLinear(WEIGHT.float(), None)]
    measure(linears, HostRuntime())
    assert all(set(linear.ways) == {Way.LIBRARY} for linear in linears)
