"""Who gets a place when: up to the bound at once, flows in turns, and no place is lost to those who leave."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.room import Room


class Visits:
    """Callers that stay in a room until they are told to go."""

    def __init__(self, num_places: int, num_guests: int = 0) -> None:
        self.room = Room(num_places, num_guests)
        self.inside: list[str] = []
        self.most = 0
        self._go: dict[str, asyncio.Event] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str) -> None:
        """A caller of the flow that the name's first letter says; "a" is that of moderations, None."""
        self._go[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._visit(name))
        await asyncio.sleep(0)

    async def leave(self, name: str) -> None:
        self._go[name].set()
        await self._tasks[name]
        await asyncio.sleep(0)

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        with suppress(asyncio.CancelledError):
            await self._tasks[name]
        await asyncio.sleep(0)

    async def _visit(self, name: str) -> None:
        async with self.room.place(None if name[0] == "a" else name[0]):
            self.inside.append(name)
            self.most = max(self.most, len(self.inside))
            try:
                await self._go[name].wait()
            finally:
                self.inside.remove(name)


async def test_flows_take_turns_and_each_keeps_its_order() -> None:
    visits = Visits(1)
    for name in ("a1", "a2", "a3", "a4", "b1", "b2"):
        await visits.come(name)
    seen = []
    while visits.inside:
        (name,) = visits.inside
        seen.append(name)
        await visits.leave(name)
    assert seen == ["a1", "a2", "b1", "a3", "b2", "a4"]


async def test_flows_take_turns_however_many_callers_they_have() -> None:
    visits, order = Visits(1), ""
    for number, flow in enumerate("aaaaaabbc"):
        await visits.come(f"{flow}{number}")
    while visits.inside:
        (name,) = visits.inside
        order += name[0]
        await visits.leave(name)
    assert order == "aabcabaaa"


async def test_those_who_have_given_up_cost_their_flow_no_turn() -> None:
    """Under overload the first to give up are those of a busy flow, whose others then waited until they did, too."""
    visits, order = Visits(1), ""
    for name in ("a0", "a1", "a2", "a3", "b1", "b2", "b3", "a4", "a5"):
        await visits.come(name)
    for name in ("a1", "a2", "a3"):
        await visits.cancel(name)
    while visits.inside:
        (name,) = visits.inside
        order += name[0]
        await visits.leave(name)
    assert order == "aababb"


async def test_so_many_places_are_given_and_no_more() -> None:
    visits = Visits(2)
    for name in ("a1", "a2", "a3", "a4"):
        await visits.come(name)
    assert visits.inside == ["a1", "a2"]
    await visits.leave("a1")
    assert visits.inside == ["a2", "a3"]
    await visits.leave("a2")
    assert visits.inside == ["a3", "a4"]


@pytest.mark.parametrize("is_given", [False, True])
async def test_who_leaves_while_waiting_costs_no_place(is_given: bool) -> None:
    """Also if the place comes in the moment in which it leaves."""
    visits = Visits(1)
    for name in ("a", "b", "c"):
        await visits.come(name)
    if is_given:
        visits._go["a"].set()
        await asyncio.sleep(0)
        await visits.cancel("b")
    else:
        await visits.cancel("b")
        await visits.leave("a")
    assert visits.inside == ["c"]
    await visits.leave("c")
    await visits.come("d")
    await visits.come("e")
    assert visits.inside == ["d"]
    await visits.cancel("e")


async def test_a_flow_that_holds_no_place_need_not_wait_for_one_that_holds_them_all() -> None:
    """32 long moderations held all places for seconds, and every chat waited."""
    visits = Visits(2, num_guests=1)
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        await visits.come(name)
    assert visits.inside == ["a1", "a2", "b1"]
    await visits.leave("b1")
    assert visits.inside == ["a1", "a2", "b2"]
    await visits.leave("a1")
    assert visits.inside == ["a2", "b2", "c1"]
    await visits.leave("b2")
    await visits.leave("c1")
    assert visits.inside == ["a2", "a3"]


async def test_one_that_is_cancelled_as_it_gets_its_place_passes_it_on() -> None:
    visits = Visits(1)
    for name in ("a1", "a2", "a3"):
        await visits.come(name)
    # Both in one round of the event loop: the place is a2's before it learns that it is cancelled.
    visits._go["a1"].set()
    await asyncio.sleep(0)
    await visits.cancel("a2")
    assert visits.inside == ["a3"]


@given(
    st.integers(1, 3),
    st.integers(0, 2),
    st.lists(st.tuples(st.sampled_from(["come", "leave", "cancel"]), st.integers(0, 9))),
)
def test_all_places_are_used_and_none_is_lost(num_places: int, num_guests: int, moves: list[tuple[str, int]]) -> None:
    async def run() -> None:
        visits, here = Visits(num_places, num_guests), list[str]()
        for number, (move, which) in enumerate(moves):
            if move == "come":
                here.append(f"{'abc'[which % 3]}{number}")
                await visits.come(here[-1])
            elif move == "cancel" and here:
                await visits.cancel(here.pop(which % len(here)))
            elif move == "leave" and visits.inside:
                name = visits.inside[which % len(visits.inside)]
                here.remove(name)
                await visits.leave(name)
            assert len(visits.inside) >= min(num_places, len(here))
            outside = {name[0] for name in here} - {name[0] for name in visits.inside}
            assert not outside or len(visits.inside) == num_places + num_guests
        for name in here:
            await visits.cancel(name)
        assert visits.most <= num_places + num_guests
        assert visits.room._num_inside == 0
        assert not visits.room._inside_by_flow

    asyncio.run(run())
