from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.translation.streaming import MAX_READY_EVENTS, EventBatches, collect, joined_calls
from deployments.answer_events import CallDelta, EndReason, Finished, GenerationEvent, Started, TextDelta
from deployments.generation import ToolCall

END = Finished(reason=EndReason.STOP, num_prompt_tokens=1, num_completion_tokens=1, num_cached_tokens=0)


class Source:
    """Yields what it is given; counts what was taken and whether it was closed."""

    def __init__(self, *events: GenerationEvent | BaseException | asyncio.Event) -> None:
        self.events = events
        self.num_taken = 0
        self.is_closed = False

    async def run(self) -> AsyncIterator[GenerationEvent]:
        try:
            for event in self.events:
                if isinstance(event, asyncio.Event):
                    await event.wait()
                elif isinstance(event, BaseException):
                    raise event
                else:
                    self.num_taken += 1
                    yield event
        finally:
            self.is_closed = True


STARTED = Started(num_prompt_tokens=1, num_cached_tokens=0)


async def test_what_is_ready_together_comes_in_one_batch() -> None:
    more = asyncio.Event()
    source = Source(STARTED, TextDelta(text="a"), TextDelta(text="b"), more, TextDelta(text="c"), END)
    events = await EventBatches([source.run()]).open()
    await asyncio.sleep(0)
    batches = events.batches()
    first = await anext(batches)
    assert [item.event for item in first] == [STARTED, TextDelta(text="a"), TextDelta(text="b")]
    more.set()
    rest = [item.event async for batch in batches for item in batch]
    assert rest == [TextDelta(text="c"), END]
    await events.close()


async def test_a_slow_reader_holds_up_the_source() -> None:
    source = Source(STARTED, *[TextDelta(text="x")] * 1000, END)
    events = await EventBatches([source.run()]).open()
    for _ in range(50):
        await asyncio.sleep(0)
    assert source.num_taken <= MAX_READY_EVENTS + 2
    text = [item async for batch in events.batches() for item in batch]
    assert len(text) == 1002
    await events.close()


async def test_a_deadline_ends_an_answer_that_waits_for_its_reader() -> None:
    """Only the answer itself saw its deadline, and not while it waited: it stayed open for as long as its client."""
    source = Source(STARTED, *[TextDelta(text="x")] * 1000, END)
    events = await EventBatches([source.run()], timeout_s=0.01).open()
    async with asyncio.timeout(5):
        while not source.is_closed:
            await asyncio.sleep(0.01)
    seen: list[GenerationEvent] = []

    async def read() -> None:
        async for batch in events.batches():
            seen.extend(item.event for item in batch)

    with pytest.raises(TimeoutError):
        await read()
    assert seen[0] == STARTED
    assert len(seen) <= MAX_READY_EVENTS + 2
    await events.close()


async def test_a_reader_that_keeps_up_reads_what_is_there_after_the_deadline() -> None:
    source = Source(STARTED, *[TextDelta(text="x")] * 10, END)
    events = await EventBatches([source.run()], timeout_s=0.0).open()
    assert [item.event async for batch in events.batches() for item in batch] == [*source.events]
    await events.close()


async def test_opening_waits_for_every_first_event_and_raises_what_came_before_it() -> None:
    slow, ready = Source(asyncio.Event()), Source(STARTED, ValueError("wrong"))
    broken = Source(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        await EventBatches([slow.run(), ready.run(), broken.run()]).open()
    assert slow.is_closed
    assert ready.is_closed
    assert broken.is_closed


class Panic(BaseException):
    """What a library in Rust raises where it gives up."""


async def test_a_failure_that_is_no_exception_leaves_nobody_waiting() -> None:
    with pytest.raises(RuntimeError, match="Panic"):
        await asyncio.wait_for(collect([Source(STARTED, Panic()).run()]), 5)


async def test_closing_ends_every_source() -> None:
    sources = [Source(STARTED, asyncio.Event()) for _ in range(3)]
    events = await EventBatches([source.run() for source in sources]).open()
    await events.close()
    assert all(source.is_closed for source in sources)
    await events.close()


async def test_events_before_a_failure_are_delivered_first() -> None:
    source = Source(STARTED, TextDelta(text="a"), ValueError("late"))
    events = await EventBatches([source.run()]).open()
    seen: list[GenerationEvent] = []

    async def read() -> None:
        async for batch in events.batches():
            seen.extend(item.event for item in batch)

    with pytest.raises(ValueError, match="late"):
        await read()
    assert seen == [STARTED, TextDelta(text="a")]
    await events.close()


async def test_collecting_keeps_the_order_of_the_requests() -> None:
    wait = asyncio.Event()
    late = Source(wait, STARTED, TextDelta(text="late"), END)
    early = Source(STARTED, TextDelta(text="ear"), TextDelta(text="ly"), END)
    task = asyncio.create_task(collect([late.run(), early.run()]))
    await asyncio.sleep(0)
    wait.set()
    assert [answer.text for answer in await task] == ["late", "early"]


async def test_cancelling_a_collection_ends_every_source() -> None:
    sources = [Source(STARTED, asyncio.Event()) for _ in range(2)]
    task = asyncio.create_task(collect([source.run() for source in sources]))
    for _ in range(5):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(source.is_closed for source in sources)


def test_the_pieces_of_a_call_are_joined_once() -> None:
    """Added one by one, all that came before is copied for each: of 120,000 tokens, that took seconds."""

    class Piece(str):
        __slots__ = ()

        def __radd__(self, before: str) -> str:
            raise AssertionError("a copy of all pieces before it")

    pieces = [CallDelta(index=index, arguments=Piece(text)) for index, text in [(0, "{"), (1, "[]"), (0, "}")]]
    heads = [CallDelta(index=index, call_id=f"id{index}", name="f") for index in range(2)]
    assert joined_calls([*heads, *pieces]) == (
        ToolCall(call_id="id0", name="f", arguments="{}"),
        ToolCall(call_id="id1", name="f", arguments="[]"),
    )
