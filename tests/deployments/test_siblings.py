from __future__ import annotations

import asyncio
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.siblings import Siblings
from engine.errors import OverloadError


def refusal(reason: str = "queue_time") -> OverloadError:
    return OverloadError("no room", retry_after_s=1.0, reason=reason)


class Server:
    """Serves so many at once, and refuses others."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self.num_asked = 0
        self.served: list[int] = []

    async def serve(self, number: int) -> None:
        self.num_asked += 1
        if not self.num_places:
            raise refusal()
        self.num_places -= 1
        await asyncio.sleep(0)
        self.num_places += 1
        self.served.append(number)


async def part(siblings: Siblings, server: Server, number: int) -> None:
    while True:
        try:
            with siblings.asked(number):
                await server.serve(number)
                return
        except OverloadError as error:
            if not siblings.may_wait(error):
                raise
        await siblings.until_room()


@given(num_places=st.integers(1, 10), num_parts=st.integers(1, 40))
def test_all_parts_are_served_by_a_server_with_room_for_any(num_places: int, num_parts: int) -> None:
    async def run() -> None:
        siblings, server = Siblings(), Server(num_places)
        async with asyncio.timeout(5):
            await asyncio.gather(*(part(siblings, server, number) for number in range(num_parts)))
        assert sorted(server.served) == list(range(num_parts))
        assert server.num_asked <= 3 * num_parts

    asyncio.run(run())


async def test_a_part_is_refused_if_none_has_room() -> None:
    with pytest.raises(OverloadError):
        await part(Siblings(), Server(0), 0)


async def test_only_want_of_room_is_waited_for() -> None:
    siblings = Siblings()
    with siblings.asked(0):
        assert siblings.may_wait(refusal("replicas_full"))
        assert not siblings.may_wait(refusal("deadline"))
        assert not siblings.may_wait(refusal("busy"))


async def test_room_that_nobody_waits_for_any_more_is_nobodys() -> None:
    siblings = Siblings()
    with siblings.asked(0):
        waiting = [asyncio.ensure_future(siblings.until_room()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        siblings.leave_queue(0)
        await asyncio.wait(waiting[:1])
        assert waiting[0].cancelled()
        assert not waiting[1].done()
    await asyncio.wait_for(waiting[1], 5)
    assert not siblings.may_wait(refusal())


async def test_others_find_the_queue_half_empty_before_it_is_filled_again() -> None:
    siblings = Siblings()
    with ExitStack() as parts:
        for number in range(8):
            parts.enter_context(siblings.asked(number))
        waiting = [asyncio.ensure_future(siblings.until_room()) for _ in range(6)]
        for number in range(3):
            siblings.leave_queue(number)
        await asyncio.sleep(0)
        assert not any(one.done() for one in waiting)
        siblings.leave_queue(3)
        await asyncio.wait(waiting[:4])
        assert [one.done() for one in waiting] == [True] * 4 + [False] * 2
        for number in range(4, 6):
            siblings.leave_queue(number)
        await asyncio.wait(waiting, timeout=5)
