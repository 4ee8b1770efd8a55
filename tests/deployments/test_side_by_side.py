from __future__ import annotations

import asyncio

import pytest

from deployments.side_by_side import side_by_side


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
