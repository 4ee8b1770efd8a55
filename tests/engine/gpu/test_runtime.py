"""Recordings, on a GPU or a simulated one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.gpu.runtime import NUM_TIMED, CudaRuntime


def test_a_recording_with_branches_does_everything_in_its_place() -> None:
    """Many of them, whose results all take over the places of those before."""
    runtime = CudaRuntime(torch.device("cuda"))
    x = torch.zeros(1 << (20 if torch.cuda.is_available() else 8), device="cuda")

    def run() -> torch.Tensor:
        total = torch.zeros_like(x)
        for number in range(64):
            source = x + number
            with runtime.beside() as join:
                doubled = (source * 2).sin()
            total += source.cos()
            join()
            total += doubled
        return total

    replay, out = runtime.record(run)
    for value in (0.5, -3.0):
        x.fill_(value)
        replay()
        torch.testing.assert_close(out, run())


def test_a_time_is_that_of_one_of_several_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    replays: list[torch.Tensor] = []
    record = CudaRuntime.record

    def counted(self: CudaRuntime, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        replay, out = record(self, run)

        def replay_counted() -> None:
            replay()
            replays.append(out)

        return replay_counted, out

    monkeypatch.setattr(CudaRuntime, "record", counted)
    x = torch.ones(4, device="cuda")
    assert 0 < CudaRuntime(torch.device("cuda")).seconds(lambda: x + 1) < 1
    # The first only keeps the device busy.
    assert len(replays) == NUM_TIMED + 1
    assert replays[-1].tolist() == [2] * 4


def test_what_waits_is_told_and_leaves_all_else_recordable() -> None:
    runtime = CudaRuntime(torch.device("cuda"))
    x = torch.ones(4, device="cuda")

    def allocates_from_the_host() -> torch.Tensor:
        return x + torch.tensor([1.0, 2.0, 3.0, 4.0], device="cuda")

    for waits in (lambda: x[x > 0], lambda: x * x.sum().item(), allocates_from_the_host):
        assert not runtime.only_enqueues(waits)
    assert runtime.only_enqueues(lambda: x + 1)
    replay, out = runtime.record(lambda: x + 1)
    x.fill_(5)
    replay()
    assert out.tolist() == [6] * 4


def test_a_recording_that_fails_leaves_the_stream_as_it_was_and_all_else_recordable() -> None:
    """Others wait for what is on the default stream before they copy."""
    device = torch.device("cuda")
    runtime, x = CudaRuntime(device), torch.ones(4, device="cuda")

    def waits_for_an_event() -> torch.Tensor:
        y = x + 1
        if torch.cuda.is_current_stream_capturing():
            runtime.fence()()
        return y

    before = torch.cuda.current_stream(device).cuda_stream
    with pytest.raises(RuntimeError):
        runtime.record(waits_for_an_event)
    assert torch.cuda.current_stream(device).cuda_stream == before
    assert runtime.taken_bytes() > 0
    replay, out = runtime.record(lambda: x * 2)
    x.fill_(5)
    replay()
    assert out.tolist() == [10] * 4
