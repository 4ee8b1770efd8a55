"""What a device cannot record, or computes wrongly once it is recorded, is given up; the rest stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import count

import pytest
import torch
from triton.runtime.errors import OutOfResources

from engine.gpu import trial
from engine.gpu.runtime import CudaRuntime
from engine.gpu.trial import APART, IN_TURN, ONE_STREAM, SWITCHES, Switch, settle
from tests.kernels.gpu.conftest import DEVICE

Step = Callable[[], torch.Tensor]


@pytest.fixture(autouse=True)
def all_on(monkeypatch: pytest.MonkeyPatch) -> None:
    for switch in SWITCHES:
        monkeypatch.setattr(switch.module, switch.attribute, True)


def off() -> tuple[Switch, ...]:
    return tuple(switch for switch in SWITCHES if switch.is_off)


def refuses(with_this: Switch | None) -> Step:
    """Return a step that cannot be recorded as long as a switch is on, or at all."""

    def step() -> torch.Tensor:
        is_bad = with_this is None or not with_this.is_off
        if is_bad and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("operation not permitted when stream is capturing")
        return torch.ones(3, device=DEVICE)

    return step


def does_not_fit(with_this: Switch) -> Step:
    """Return a step with a kernel that cannot even be launched, as long as a switch is on."""

    def step() -> torch.Tensor:
        if not with_this.is_off:
            raise OutOfResources(240_000, 232_448, "shared memory")
        return torch.ones(3, device=DEVICE)

    return step


def is_wrong(with_this: Switch, factor: float) -> Step:
    """Return a step that computes something else when it is recorded, as long as a switch is on."""

    def step() -> torch.Tensor:
        x = torch.full((3,), 8.0, device=DEVICE)
        return x * (factor if not with_this.is_off and torch.cuda.is_current_stream_capturing() else 1)

    return step


@pytest.mark.parametrize(
    ("bad", "given_up"),
    [
        (refuses(ONE_STREAM), (ONE_STREAM,)),
        (refuses(IN_TURN), (ONE_STREAM, IN_TURN)),
        (does_not_fit(APART), (ONE_STREAM, IN_TURN, APART)),
        (is_wrong(ONE_STREAM, 1.1), (ONE_STREAM,)),
        (is_wrong(APART, torch.nan), (ONE_STREAM, IN_TURN, APART)),
        (is_wrong(ONE_STREAM, 1.01), ()),
    ],
)
def test_as_much_is_given_up_as_is_needed_and_said(
    caplog: pytest.LogCaptureFixture, bad: Step, given_up: tuple[Switch, ...]
) -> None:
    asked = []

    def steps() -> Iterator[Step]:
        asked.append(off())
        yield lambda: torch.ones(2, device=DEVICE)
        yield bad

    assert settle(steps, CudaRuntime(DEVICE))
    assert off() == given_up
    assert asked == [given_up[:count] for count in range(len(given_up) + 1)]
    assert all(f"({switch.name})" in caplog.text for switch in given_up)


def test_what_is_right_at_first_is_replayed_until_it_may_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class OftenRight(CudaRuntime):
        def record(self, run: Step) -> tuple[Callable[[], None], torch.Tensor]:
            replay, out = super().record(run)
            numbers = count(1)

            def often_right() -> None:
                replay()
                if next(numbers) == 3 and not ONE_STREAM.is_off:
                    out.mul_(2)

            return often_right, out

    def steps() -> Iterator[Step]:
        yield lambda: torch.ones(2, device=DEVICE)

    monkeypatch.setattr(trial, "NUM_REPLAYS", 2)
    assert settle(steps, OftenRight(DEVICE))
    assert off() == ()
    monkeypatch.setattr(trial, "NUM_REPLAYS", 3)
    assert settle(steps, OftenRight(DEVICE))
    assert off() == (ONE_STREAM,)


def test_steps_that_cannot_be_recorded_in_any_way_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    runtime = CudaRuntime(DEVICE)
    assert not settle(lambda: [refuses(None)], runtime)
    assert off() == SWITCHES
    assert "not permitted" in caplog.text
    assert settle(lambda: [lambda: torch.ones(2, device=DEVICE)], runtime)


@pytest.mark.parametrize("number", [torch.nan, -torch.inf])
def test_what_is_no_number_anyway_is_not_wrong_and_hides_nothing(number: float) -> None:
    def step(factor: float) -> torch.Tensor:
        is_wrong = torch.cuda.is_current_stream_capturing() and not ONE_STREAM.is_off
        return torch.cat(
            [torch.full((1,), number, device=DEVICE), torch.full((1,), factor if is_wrong else 1.0, device=DEVICE)]
        )

    assert settle(lambda: [partial(step, 1.0)], CudaRuntime(DEVICE))
    assert off() == ()
    assert settle(lambda: [partial(step, 1.1)], CudaRuntime(DEVICE))
    assert off() == (ONE_STREAM,)


def test_memory_that_does_not_do_is_nothing_that_a_switch_could_mend() -> None:
    def step() -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("full")
        return torch.ones(2, device=DEVICE)

    with pytest.raises(torch.OutOfMemoryError):
        settle(lambda: [step], CudaRuntime(DEVICE))
    assert off() == ()
