"""Merge several generations into one sequence of batches of events that are ready together.

A batch becomes one write to the client: if the client or this process falls behind, writes get fewer and larger. Events
that a slow client has not read wait in a bounded queue; when it is full, back-pressure stops the gateway's iterator,
which then cannot see its own deadline pass: here it ends while it waits for the reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from math import inf
from typing import Self

from deployments.answer_events import CallDelta, Finished, GenerationEvent, Started, TextDelta, TokenScore
from deployments.generation import ToolCall

MAX_READY_EVENTS = 64


@dataclass(frozen=True, slots=True)
class ChoiceEvent:
    """An event of the answer at `index`."""

    index: int
    event: GenerationEvent


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        deltas: the pieces in which it arrived.
    """

    text: str
    finished: Finished
    started: Started
    scores: tuple[TokenScore, ...] = ()
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    deltas: Sequence[TextDelta] = ()

    @property
    def token_ids(self) -> list[int]:
        """The ids of its tokens, if the request returns them."""
        return [token_id for delta in self.deltas for token_id in delta.token_ids]

    @property
    def shown_ids(self) -> list[int]:
        """Those of `token_ids` whose tokens are of content or calls."""
        return [token_id for delta in self.deltas for token_id in delta.shown_ids]

    @property
    def shown_scores(self) -> list[TokenScore]:
        """Those of `scores` whose tokens are of content or calls."""
        return [score for delta in self.deltas for score in delta.shown_scores]

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of its tokens; minus infinity if there are none."""
        scores = [score.logprob for score in self.scores if score.logprob is not None]
        return sum(scores) / len(scores) if scores else -inf


@dataclass(frozen=True, slots=True)
class _Ended:
    index: int
    error: Exception | None


class EventBatches:
    """Runs generations concurrently; closing it closes all of them.

    The first failure of any generation ends all.

    Args:
        at_end: awaited once the reader has had all events, if none failed.
        timeout_s: seconds from `open` after which an answer that waits for the reader fails; None for no limit.
    """

    def __init__(
        self,
        generations: Sequence[AsyncGenerator[GenerationEvent, None]],
        at_end: Callable[[], Awaitable[None]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        self._generations = generations
        self._at_end = at_end
        self._timeout_s = timeout_s
        self._deadline_s: float | None = None
        self._ready: asyncio.Queue[ChoiceEvent | _Ended] = asyncio.Queue(MAX_READY_EVENTS)
        self._held: list[ChoiceEvent | _Ended] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> Self:
        """Start and wait for the first event of every generation, so that earlier errors get an HTTP status.

        Raises:
            Exception: raised by a generation before its first event; all are closed first.
        """
        if self._timeout_s is not None:
            self._deadline_s = asyncio.get_running_loop().time() + self._timeout_s
        self._tasks = [
            asyncio.create_task(self._run(index, generation)) for index, generation in enumerate(self._generations)
        ]
        silent = set(range(len(self._generations)))
        try:
            while silent:
                item = await self._ready.get()
                if isinstance(item, _Ended) and item.error is not None:
                    raise item.error
                self._held.append(item)
                silent.discard(item.index)
        except BaseException:
            await self.close()
            raise
        return self

    async def batches(self) -> AsyncIterator[list[ChoiceEvent]]:
        """Yield non-empty lists of events in order; re-raise a generation's error after the events before it."""
        num_running = len(self._generations)
        items, self._held = self._held, []
        while True:
            while not self._ready.empty():
                items.append(self._ready.get_nowait())
            batch = [item for item in items if isinstance(item, ChoiceEvent)]
            ended = [item for item in items if isinstance(item, _Ended)]
            if batch:
                yield batch
            for item in ended:
                if item.error is not None:
                    raise item.error
            num_running -= len(ended)
            if num_running == 0:
                if self._at_end is not None:
                    await self._at_end()
                return
            items = [await self._ready.get()]

    async def close(self) -> None:
        """Stop all generations and wait until they have released their requests. Idempotent."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, index: int, generation: AsyncGenerator[GenerationEvent, None]) -> None:
        error: Exception | None = None
        try:
            async with aclosing(generation) as events:
                async for event in events:
                    await self._hand_over(ChoiceEvent(index, event))
        except asyncio.CancelledError:
            raise
        except BaseException as caught:  # noqa: BLE001 - passed to the reader, which raises it
            # A panic of a Rust library is not an `Exception`; unless it is passed on, the reader waits forever.
            error = caught if isinstance(caught, Exception) else RuntimeError(repr(caught))
        await self._ready.put(_Ended(index, error))

    async def _hand_over(self, item: ChoiceEvent) -> None:
        if not self._ready.full():
            self._ready.put_nowait(item)
            return
        async with asyncio.timeout_at(self._deadline_s):
            await self._ready.put(item)


async def collect(generations: Sequence[AsyncGenerator[GenerationEvent, None]]) -> list[Answer]:
    """Run all generations to completion and return the answers in order.

    Raises:
        Exception: raised by a generation; the others are closed first.
    """
    pieces: list[list[TextDelta]] = [[] for _ in generations]
    started: dict[int, Started] = {}
    finished: dict[int, Finished] = {}
    events = EventBatches(generations)
    try:
        await events.open()
        async for batch in events.batches():
            for item in batch:
                if isinstance(item.event, TextDelta):
                    pieces[item.index].append(item.event)
                elif isinstance(item.event, Started):
                    started[item.index] = item.event
                else:
                    finished[item.index] = item.event
    finally:
        await events.close()
    return [
        Answer(
            text="".join(delta.text for delta in deltas),
            finished=finished[index],
            started=started[index],
            scores=tuple(score for delta in deltas for score in delta.scores),
            reasoning="".join(delta.reasoning for delta in deltas),
            calls=joined_calls(call for delta in deltas for call in delta.calls),
            deltas=deltas,
        )
        for index, deltas in enumerate(pieces)
    ]


def joined_calls(deltas: Iterable[CallDelta]) -> tuple[ToolCall, ...]:
    """Join pieces of calls into whole calls."""
    firsts: list[CallDelta] = []
    pieces: list[list[str]] = []
    for delta in deltas:
        if delta.index == len(firsts):
            firsts.append(delta)
            pieces.append([])
        pieces[delta.index].append(delta.arguments)
    return tuple(
        ToolCall(call_id=first.call_id or "", name=first.name or "", arguments="".join(arguments))
        for first, arguments in zip(firsts, pieces, strict=True)
    )
