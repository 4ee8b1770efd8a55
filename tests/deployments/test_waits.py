from __future__ import annotations

import asyncio
from contextvars import ContextVar
from functools import partial

import pytest

from deployments import waits
from deployments.errors import UnavailableError
from deployments.waits import SharedCall, detached, for_ever, patiently, side_by_side
from engine.errors import OverloadError


class Away:
    """Somebody who is not there for so many calls."""

    def __init__(self, num_calls: int) -> None:
        self.num_left = num_calls

    async def answer(self) -> str:
        if self.num_left:
            self.num_left -= 1
            raise UnavailableError("Nobody is there.", retry_after_s=1.0)
        return "here"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "POLL_S", 0.001)


async def test_who_comes_in_time_is_waited_for() -> None:
    assert await patiently(Away(3).answer, 5.0) == "here"


async def test_who_does_not_is_given_up() -> None:
    away = Away(10**6)
    with pytest.raises(UnavailableError):
        await patiently(away.answer, 0.01)
    assert away.num_left < 10**6 - 1


async def test_who_is_overloaded_is_asked_again_once_there_is_room_and_only_where_that_is_wanted() -> None:
    refusals = [OverloadError("full", retry_after_s=0.002), UnavailableError("away", retry_after_s=3600.0)]

    async def answer() -> str:
        if refusals:
            raise refusals.pop()
        return "here"

    with pytest.raises(OverloadError, match="full"):
        await patiently(answer, 60.0)
    refusals.append(OverloadError("full", retry_after_s=0.002))
    assert await patiently(answer, 60.0, OverloadError) == "here"
    refusals.append(OverloadError("full", retry_after_s=61.0))
    with pytest.raises(OverloadError):
        await patiently(answer, 60.0, OverloadError)


async def test_an_answer_that_is_an_error_is_not_asked_for_again() -> None:
    calls = []

    async def fail() -> None:
        calls.append(1)
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        await patiently(fail, 5.0)
    assert calls == [1]


async def after(number: int, gate: asyncio.Event) -> int:
    await gate.wait()
    return number


async def test_results_come_in_order_and_an_empty_list_of_none() -> None:
    gate = asyncio.Event()
    gate.set()
    assert await side_by_side(after(number, gate) for number in range(3)) == [0, 1, 2]
    assert await side_by_side([]) == []


async def test_the_first_failure_ends_the_others_before_it_is_told() -> None:
    ended: list[str] = []

    async def wait_for_ever() -> int:
        try:
            return await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.sleep(0)
            ended.append("other")

    async def fail() -> int:
        raise ValueError("first")

    with pytest.raises(ValueError, match="first"):
        await side_by_side([wait_for_ever(), fail()])
    assert ended == ["other"]


async def test_whoever_leaves_takes_them_along() -> None:
    gate = asyncio.Event()
    waiting = asyncio.create_task(side_by_side([after(1, gate), after(2, gate)]))
    await asyncio.sleep(0)
    before = asyncio.all_tasks()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(task.done() for task in before - {asyncio.current_task()})


async def test_who_asks_while_a_call_runs_shares_it_and_who_leaves_takes_nothing_from_the_others() -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    started = []

    async def call() -> int:
        started.append(1)
        return await after(len(started), gates[len(started) - 1])

    shared = SharedCall(call)
    leaver, stayer = asyncio.create_task(shared.result()), asyncio.create_task(shared.result())
    await asyncio.sleep(0)
    leaver.cancel()
    gates[0].set()
    assert await stayer == 1
    assert leaver.cancelled()
    # What comes later may have changed.
    gates[1].set()
    assert await shared.result() == 2


async def test_detached_work_ends_though_its_starter_leaves_and_knows_nothing_of_its_request() -> None:
    """In the request's context Serve would cancel the calls of the work together with the request."""
    request: ContextVar[str] = ContextVar("request", default="none")
    gate, seen = asyncio.Event(), []

    async def work() -> None:
        await gate.wait()
        seen.append(request.get())

    async def start() -> None:
        request.set("first")
        await asyncio.shield(detached(work()))

    starter = asyncio.create_task(start())
    await asyncio.sleep(0)
    starter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starter
    gate.set()
    await asyncio.gather(*waits._detached)
    assert seen == ["none"]


@pytest.mark.parametrize("is_swallowed", [False, True])
async def test_a_task_ends_when_cancelled_though_an_error_took_the_cancellation_s_place(is_swallowed: bool) -> None:
    has_begun = asyncio.Event()

    async def work() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not is_swallowed:
                raise ValueError from None

    task = asyncio.create_task(for_ever(work, partial(asyncio.sleep, 3600), "it failed"))
    await has_begun.wait()
    task.cancel()
    await asyncio.wait({task}, timeout=30)
    assert task.done()
    task.cancel()


async def test_a_task_goes_on_after_an_error_and_logs_it(caplog: pytest.LogCaptureFixture) -> None:
    num_begun, goes_on = 0, asyncio.Event()

    async def work() -> None:
        nonlocal num_begun
        num_begun += 1
        if num_begun == 1:
            raise ValueError("once")
        if num_begun == 4:
            goes_on.set()

    task = asyncio.create_task(for_ever(work, partial(asyncio.sleep, 0), "it failed"))
    await asyncio.wait_for(goes_on.wait(), 30)
    task.cancel()
    assert caplog.messages == ["it failed"]
