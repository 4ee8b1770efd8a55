from __future__ import annotations

import asyncio

import pytest

from deployments.batches.turns import Turns


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_tenants_take_turns_however_many_requests_they_have() -> None:
    turns, order = Turns(1), []

    async def work(tenant: str) -> None:
        await turns.take(tenant)
        order.append(tenant)
        await asyncio.sleep(0)
        turns.give_back()

    async with asyncio.TaskGroup() as works:
        for tenant in "aaaaaabbc":
            works.create_task(work(tenant))
    assert "".join(order) == "aabcabaaa"


async def test_so_many_turns_are_given_and_no_more() -> None:
    turns = Turns(2)
    works = [asyncio.create_task(turns.take("a")) for _ in range(4)]
    await settle()
    assert [work.done() for work in works] == [True, True, False, False]
    turns.give_back()
    await settle()
    assert [work.done() for work in works] == [True, True, True, False]
    turns.give_back()
    await settle()
    assert all(work.done() for work in works)


@pytest.mark.parametrize("is_given", [False, True])
async def test_who_leaves_while_waiting_costs_no_turn(is_given: bool) -> None:
    """Also if the turn comes in the moment in which it leaves."""
    turns = Turns(1)
    await turns.take("a")
    leaving, staying = (asyncio.create_task(turns.take(tenant)) for tenant in "bc")
    await settle()
    if is_given:
        turns.give_back()
    leaving.cancel()
    if not is_given:
        turns.give_back()
    await asyncio.wait({leaving})
    await staying
    turns.give_back()
    await asyncio.wait_for(turns.take("d"), timeout=10)
    waiting = asyncio.create_task(turns.take("e"))
    await settle()
    assert not waiting.done()
    waiting.cancel()
