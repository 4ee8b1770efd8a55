"""Which way a product goes: the one that was measured to be the fastest, and right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.errors import OutOfResources

from engine.gpu import streamed_linear
from engine.gpu.runtime import CudaRuntime
from engine.gpu.streamed_linear import ROWS, StreamedLinear, Way, measure
from kernels.gated_activation.reference import activate_and_multiply
from kernels.streamed_linear.launch import BLOCK_N, MAX_ROWS
from kernels.streamed_linear.reference import from_int4, to_int4
from tests.kernels.gpu.conftest import DEVICE


@pytest.fixture
def weight() -> torch.Tensor:
    return torch.randn(80, 128, device=DEVICE).half()


class Operators(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


class Timed(CudaRuntime):
    """By its clock a way takes what a table says of it and a number of rows, 2 where it says nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: dict[tuple[object, int], float]) -> None:
        super().__init__(DEVICE)
        self._times = times
        self._last: tuple[object, int] = Way.LIBRARY, 0
        for name in ("multiply", "gate"):
            monkeypatch.setattr(StreamedLinear, name, self._noted(getattr(StreamedLinear, name)))

    def _noted(self, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(linear: StreamedLinear, x: torch.Tensor, way: Way, *out: torch.Tensor | None) -> torch.Tensor:
            self.note(way, len(x))
            return run(linear, x, way, *out)

        return noted

    def note(self, what: object, rows: int) -> None:
        """Take this for what has run last."""
        self._last = what, rows

    def seconds(self, run: Callable[[], torch.Tensor]) -> float:
        run()
        return self._times.get(self._last, 2.0)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_each_number_of_rows_goes_the_fastest_way(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    linear = StreamedLinear(weight, None, quantization=quantization)
    assert linear.rows == (ROWS if quantization else ROWS[:7])
    times = {(Way.TILES, rows): 1.0 for rows in (2, 4, 16)} | {(Way.ROWS, 1): 1.0, (Way.ROWS, 2): 1.5}
    measure([linear], Timed(monkeypatch, times))
    one = Way.LIBRARY if quantization else Way.ROWS
    assert linear.ways[:5] == (one, Way.TILES, Way.TILES, Way.LIBRARY, Way.TILES)
    taken: list[Way] = []
    monkeypatch.setattr(linear, "multiply", lambda _, way, *_out: taken.append(way))
    for rows in (1, 2, 3, 4, 5, 16, 999):
        linear(torch.ones(rows, 128, dtype=torch.bfloat16, device=DEVICE))
    assert taken == [one, *[Way.TILES] * 3, Way.LIBRARY, Way.TILES, Way.LIBRARY]


def test_a_gated_product_is_measured_as_it_is_used(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    linear, other = StreamedLinear(weight, None, is_gate_up=True), StreamedLinear(weight, None)
    measure([linear, other], Timed(monkeypatch, {(Way.ROWS, 1): 1.0}))
    assert caplog.messages[-1].startswith("timing products [")
    assert "] 2 of 2, " in caplog.messages[-1]
    taken: list[Way] = []
    monkeypatch.setattr(linear, "gate", lambda _, way: taken.append(way))
    linear.gated(weight[:1])
    linear.gated(weight[:9])
    assert taken == [Way.ROWS, Way.LIBRARY]


def test_a_product_is_measured_with_the_room_that_it_gets(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels that write another type are other kernels, and who converts in the end takes longer."""
    given: set[torch.dtype | None] = set()
    multiply = StreamedLinear.multiply

    def noted(linear: StreamedLinear, x: torch.Tensor, way: Way, out: torch.Tensor | None = None) -> torch.Tensor:
        given.add(None if out is None else out.dtype)
        return multiply(linear, x, way, out)

    monkeypatch.setattr(StreamedLinear, "multiply", noted)
    measure([StreamedLinear(weight, None, out_dtype=torch.float32)], Timed(monkeypatch, {(Way.TILES, 1): 1.0}))
    assert given == {torch.float32}


def test_all_ways_multiply_by_the_same_weights(weight: torch.Tensor) -> None:
    bias, x = weight[0].repeat(2)[:80], weight[1:3] + 1
    for quantization in (None, "int4"):
        linear = StreamedLinear(weight, bias, quantization=quantization)
        whole = from_int4(to_int4(weight)) if quantization else weight
        expected = x.double() @ whole.double().T + bias
        ways = linear.open_ways(len(x))
        assert ways == [Way.LIBRARY, Way.TILES, Way.WIDE_TILES if quantization else Way.ROWS]
        for way in ways:
            torch.testing.assert_close(linear.multiply(x, way).double(), expected, atol=0.03, rtol=1e-3)
            torch.testing.assert_close(
                linear.gate(x, way).double(), activate_and_multiply(expected, "silu"), atol=0.1, rtol=5e-3
            )
    dense = StreamedLinear(weight, None)
    assert dense.open_ways(MAX_ROWS + 1) == [Way.LIBRARY, Way.TILES]
    assert dense.open_ways(64) == [Way.LIBRARY, Way.TILES, Way.WIDE_TILES]
    assert StreamedLinear(weight[:BLOCK_N], None).open_ways(64) == [Way.LIBRARY, Way.TILES]
    x = weight[:40]
    for way in dense.open_ways(40):
        expected = x.double() @ weight.double().T
        torch.testing.assert_close(dense.multiply(x, way).double(), expected, atol=0.1, rtol=2e-3)


def test_the_library_does_not_round_what_is_kept_in_float32() -> None:
    """Logits were rounded to bfloat16 in a crowd and not alone, so the greedy choice was another one."""
    weight = torch.randn(48, 128, device=DEVICE).bfloat16()
    linear, x = StreamedLinear(weight, None, out_dtype=torch.float32), weight[:3]
    alone, together = linear.room(1), linear.room(3)
    assert linear.multiply(x, Way.LIBRARY, together) is together
    torch.testing.assert_close(together.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    for number in range(3):
        linear.multiply(x[number : number + 1], Way.ROWS, alone)
        torch.testing.assert_close(together[number : number + 1], alone, atol=1e-4, rtol=1e-5)


def test_a_step_takes_no_memory_for_logits_of_the_library() -> None:
    """They were computed in memory of their own and copied from there, once more in each step."""
    weight = torch.randn(48, 128, device=DEVICE).bfloat16()
    linear, x = StreamedLinear(weight, None, out_dtype=torch.float32), weight[:3]
    room = linear.room(3)
    with Operators() as seen:
        linear.multiply(x, Way.LIBRARY, room)
    assert seen.names == ["aten::t", "aten::mm"]


@pytest.mark.parametrize("has_bias", [False, True])
def test_where_the_library_only_rounds_its_results_are_copied(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, has_bias: bool
) -> None:
    monkeypatch.setattr(streamed_linear, "WIDENS", has_bias)
    bias = torch.ones(len(weight), dtype=weight.dtype, device=DEVICE) if has_bias else None
    linear = StreamedLinear(weight, bias, out_dtype=torch.float32)
    room = linear.room(3)
    assert linear.multiply(weight[:3], Way.LIBRARY, room) is room
    assert torch.equal(room, linear.multiply(weight[:3], Way.LIBRARY).float())


def test_a_kernel_that_is_wrong_is_not_taken(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Timed(monkeypatch, {(Way.TILES, 1): 1.0, (Way.TILES, 2): 1.0})
    right = StreamedLinear.multiply

    def wrong(linear: StreamedLinear, x: torch.Tensor, way: Way, *out: torch.Tensor | None) -> torch.Tensor:
        return right(linear, x, way, *out) * (torch.nan if (way, len(x)) == (Way.TILES, 2) else 1)

    monkeypatch.setattr(StreamedLinear, "multiply", wrong)
    linear = StreamedLinear(weight, None)
    measure([linear], runtime)
    assert linear.ways == (Way.TILES, *[Way.LIBRARY] * 6)


@pytest.mark.parametrize(
    "error", [RuntimeError("Triton Error [CUDA]: invalid argument"), OutOfResources(9, 8, "shared")]
)
def test_a_kernel_that_the_device_refuses_is_not_taken(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    runtime = Timed(monkeypatch, {(Way.TILES, rows): 1.0 for rows in (1, 2)} | {(Way.ROWS, 1): 1.5})
    multiply = StreamedLinear.multiply

    def refused(linear: StreamedLinear, x: torch.Tensor, way: Way, *out: torch.Tensor | None) -> torch.Tensor:
        if way is Way.TILES:
            raise error
        return multiply(linear, x, way, *out)

    def never(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(StreamedLinear, "multiply", refused)
    monkeypatch.setattr(StreamedLinear, "normed", never)
    linear = StreamedLinear(weight, None, is_after_norm=True)
    measure([linear], runtime)
    assert linear.ways == (Way.ROWS, *[Way.LIBRARY] * 6)
    assert linear.normed_rows == ()
    assert f"products of (80, 128) with 2 rows are not computed by our kernel: {error}" in caplog.text
    monkeypatch.setattr(StreamedLinear, "multiply", never)
    with pytest.raises(type(error)):
        measure([linear], runtime)


@pytest.mark.parametrize("is_gate_up", [False, True])
@pytest.mark.parametrize(("normed_s", "is_right"), [(1.0, True), (3.0, True), (1.0, False)])
def test_a_norm_goes_with_its_product_where_that_is_faster_and_right(
    weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch, is_gate_up: bool, normed_s: float, is_right: bool
) -> None:
    runtime = Timed(monkeypatch, {(Way.ROWS, 1): 1.5, ("normed", 1): normed_s})
    join = StreamedLinear.normed

    def normed(linear: StreamedLinear, x: torch.Tensor, *args: Any, **named: Any) -> torch.Tensor:
        runtime.note("normed", len(x))
        return join(linear, x, *args, **named) * (1 if is_right else 2)

    monkeypatch.setattr(StreamedLinear, "normed", normed)
    after, other = (StreamedLinear(weight, None, is_gate_up=is_gate_up, is_after_norm=is_it) for is_it in (True, False))
    measure([after, other], runtime)
    assert after.normed_rows == ((1,) if is_right and normed_s < 1.5 else ())
    assert other.normed_rows == ()
    assert (after.can_add(1), after.can_add(2)) == (True, False)


def test_a_product_adds_to_what_is_there(weight: torch.Tensor) -> None:
    linear, x = StreamedLinear(weight, None), weight[1:3]
    residual = torch.ones(2, len(weight), dtype=weight.dtype, device=DEVICE)
    linear.add_to(residual, x)
    expected = 1 + x.double() @ weight.double().T
    torch.testing.assert_close(residual.double(), expected, atol=0.03, rtol=1e-3)


def test_what_is_not_faster_is_the_librarys(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    linears = [StreamedLinear(weight, None), StreamedLinear(weight.float(), None)]
    measure(linears, Timed(monkeypatch, {}))
    assert all(set(linear.ways) == {Way.LIBRARY} for linear in linears)
