"""What a gateway has under way ends whole where there is time, and with a word where there is none."""

from __future__ import annotations

import asyncio

import pytest

from deployments.gateway import draining
from deployments.gateway.draining import STOPPING, Draining
from deployments.generation import HealthReport
from engine.errors import OverloadError


async def test_what_is_under_way_is_waited_for_and_nothing_more_is_taken() -> None:
    gateway = Draining()
    healthy = HealthReport(state_by_model={"m": "ready"})
    assert gateway.told(healthy).is_ready
    with gateway.answer():
        run = asyncio.create_task(gateway.run(60.0, None))
        await asyncio.sleep(0.1)
        assert not run.done()
        assert gateway.told(healthy).state_by_part == {"gateway": STOPPING}
        with pytest.raises(OverloadError, match="stopping") as refused, gateway.answer():
            pass
        assert refused.value.retry_after_s >= 1
    await run


async def test_what_is_left_at_the_limit_ends_with_an_error_and_what_comes_late_too() -> None:
    gateway = Draining()
    streams: list[asyncio.Future[None]] = []

    def fail_all(error: Exception) -> None:
        for stream in streams:
            if not stream.done():
                stream.set_exception(error)

    async def answer() -> None:
        with gateway.answer():
            # It has not come as far as its stream when the first errors are told.
            await asyncio.sleep(len(streams) * 0.2)
            streams.append(asyncio.get_running_loop().create_future())
            await streams[-1]

    answers = [asyncio.create_task(answer())]
    await asyncio.sleep(0.01)
    answers.append(asyncio.create_task(answer()))
    await asyncio.sleep(0.01)
    await gateway.run(0.0, fail_all)
    for error in await asyncio.gather(*answers, return_exceptions=True):
        assert isinstance(error, OverloadError)


async def test_who_does_not_end_at_all_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "LAST_WORDS_S", 0.0)
    gateway = Draining()
    with gateway.answer():
        await gateway.run(0.0, lambda error: None)
