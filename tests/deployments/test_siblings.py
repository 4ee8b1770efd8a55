from __future__ import annotations

import asyncio

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
            with siblings.asked():
                await server.serve(number)
                return
        except OverloadError as error:
            if not siblings.may_wait(error):
                raise
        await siblings.room()


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
    with siblings.asked():
        assert siblings.may_wait(refusal("replicas_full"))
        assert not siblings.may_wait(refusal("deadline"))
        assert not siblings.may_wait(refusal("busy"))


async def test_room_that_nobody_waits_for_any_more_goes_to_the_next() -> None:
    siblings = Siblings()
    with siblings.asked():
        waiting = [asyncio.ensure_future(siblings.room()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        siblings.make_room()
        await asyncio.wait(waiting[:2])
        assert waiting[0].cancelled()
        assert not waiting[2].done()
    await asyncio.wait_for(waiting[2], 5)
    assert not siblings.may_wait(refusal())
