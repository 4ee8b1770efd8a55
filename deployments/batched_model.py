"""Run a blocking model behind an event loop: items that arrive during a call share the next, in a worker thread.

A call holds a bounded amount of text, and the request with the least left goes first: whoever asks about one item does
not wait for all of somebody else's thousand, and under overload requests are completed one by one, not all too late.
Whoever would wait too long is refused before any work: otherwise the model would be at those whose time is about to be
up, and of an overload nothing would be completed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

from deployments.errors import UnavailableError
from deployments.handle_calls import RETRY_AFTER_S
from deployments.siblings import BATCH_TIME
from engine.errors import EngineError, OverloadError

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_CALL_S = 60.0
"""A call that takes longer counts as hung."""
MAX_CALL_CHARS = 2048
"""Bound on the items of a call together. Some hundred tokens keep a CPU's cores busy: longer calls judge no more text
per second, and running answers wait for the end of a call."""
PROMISED_SHARE = 0.8
"""Share of the longest wait that a request may be expected to have: the forecast is not exact."""
NEW_URGENT_SHARE = 0.4
"""The same for an urgent request that comes for the first time: one that comes again, as running answers do until they
have their results, has precedence."""
RETURN_SHARE = 0.2
"""Share of the longest wait after which a refused urgent request may come again: what waits outlasts that."""
KEPT_SHARE = 0.9
"""How much of the measured pace each further call leaves."""


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Item, Result]):
    """An item in no call yet."""

    item: Item
    num_chars: int
    result: asyncio.Future[Result]


@dataclass(slots=True, eq=False)
class _Asked(Generic[Item, Result]):
    """The items of one request that are in no call yet, and their characters together.

    Attributes:
        is_held_back: it had the last call to itself, and others wait: the next begins with another request.
    """

    items: deque[_Waiting[Item, Result]]
    num_chars: int
    is_held_back: bool = False


@dataclass(slots=True)
class _Pace:
    """How fast a model is, by recent calls that left something waiting: others are not as full as they could be."""

    num_chars: float = 0.0
    took_s: float = 0.0

    def note(self, num_chars: int, took_s: float) -> None:
        """Record a call."""
        self.num_chars = KEPT_SHARE * self.num_chars + num_chars
        self.took_s = KEPT_SHARE * self.took_s + took_s

    def seconds(self, num_chars: int) -> float:
        """Return how long so many characters take; 0 if unknown."""
        return num_chars * self.took_s / self.num_chars if self.num_chars else 0.0


@contextmanager
def limited(failure: str, timeout_s: float, sizes: Collection[int], max_batch: int) -> Iterator[float]:
    """Yield the time limit of a request in seconds: `timeout_s` for each call that its items fill.

    Args:
        sizes: the characters of each item.

    Raises:
        UnavailableError: the block exceeded it, which is the `failure`.
    """
    limit_s = timeout_s * max(1, math.ceil(sum(sizes) / MAX_CALL_CHARS), math.ceil(len(sizes) / max_batch))
    try:
        yield limit_s
    except TimeoutError as error:
        raise UnavailableError(f"{failure} within {limit_s:g} seconds.", retry_after_s=RETRY_AFTER_S) from error


class BatchedModel(Generic[Item, Result]):
    """Batches calls to one model for one event loop; a base class for specific models.

    Nothing waits for others to come: on a CPU a larger batch gains little, and every chat would wait for its verdict.

    Args:
        call: returns a result for each item, in order; blocks.
        what: name of the model, for messages.
        max_batch: maximum number of items in a call.
        num_chars: characters of an item; a call takes `MAX_CALL_CHARS` together, or one item.
        max_wait_s: longest time that a request may wait for others.
    """

    def __init__(
        self,
        call: Callable[[list[Item]], Sequence[Result]],
        what: str,
        *,
        max_batch: int,
        num_chars: Callable[[Item], int],
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._call = call
        self._what = what
        self._clock = clock
        self._began_s: float | None = None
        # One thread: concurrent forward passes would compete for the same cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=what)
        self._max_batch, self._num_chars, self._max_wait_s = max_batch, num_chars, max_wait_s
        self._pace = _Pace()
        self._num_called_chars = 0
        self._known_until_s: dict[Hashable, float] = {}
        self._urgent: list[_Asked[Item, Result]] = []
        self._others: list[_Asked[Item, Result]] = []
        self._is_other_due = False
        self._working: asyncio.Task[None] | None = None

    async def results(self, items: Sequence[Item], *, is_urgent: bool = False) -> list[Result]:
        """Return a result for each item, in order.

        An error of one item, or cancelling, withdraws the items that are in no call yet.

        Args:
            is_urgent: these items go before all that are not.

        Raises:
            OverloadError: others would be called for too long before.
        """
        loop = asyncio.get_running_loop()
        asked = [_Waiting[Item, Result](item, self._num_chars(item), loop.create_future()) for item in items]
        request = _Asked(deque(asked), sum(waiting.num_chars for waiting in asked))
        self._refuse_late(items, request.num_chars, is_urgent)
        requests = self._urgent if is_urgent else self._others
        requests.append(request)
        if self._working is None or self._working.done():
            # In an empty context: it outlives the request that started it.
            self._working = loop.create_task(self._work(), context=Context())
        try:
            return list(await asyncio.gather(*(waiting.result for waiting in asked)))
        finally:
            for waiting in asked:
                waiting.result.cancel()
            if request in requests:
                requests.remove(request)

    def _refuse_late(self, items: Sequence[Item], num_chars: int, is_urgent: bool) -> None:
        """Refuse a request that would wait too long; its own work does not count."""
        now_s, key = self._clock(), tuple(items)
        is_new = is_urgent and self._known_until_s.pop(key, 0.0) < now_s
        bound_s = (NEW_URGENT_SHARE if is_new else PROMISED_SHARE) * self._max_wait_s
        late_s = self._wait_s(num_chars, is_urgent) - bound_s
        if late_s <= 0:
            return
        if is_urgent:
            late_s = max(late_s, RETURN_SHARE * self._max_wait_s)
            known = {known: until_s for known, until_s in self._known_until_s.items() if until_s >= now_s}
            self._known_until_s = known | {key: now_s + late_s + self._max_wait_s}
        message = f"Too many requests are waiting for the {self._what}."
        raise OverloadError(message, retry_after_s=late_s, reason=BATCH_TIME)

    def _wait_s(self, num_chars: int, is_urgent: bool) -> float:
        """Return how long a new request of so many characters is expected to wait for others."""
        peers = self._urgent if is_urgent else self._others
        before = sum(request.num_chars for request in peers if request.num_chars <= num_chars)
        if not is_urgent:
            before += sum(request.num_chars for request in self._urgent)
        waiting = sum(request.num_chars for request in (*self._urgent, *self._others))
        # Who comes after it in order may have every second call.
        return self._pace.seconds(self._num_called_chars + before + min(before, waiting - before))

    async def trouble(self) -> str | None:
        """Return why no results come, or None if they do. Gateways call it."""
        return self._trouble()

    def check_health(self) -> None:
        """Check for Serve that the model makes progress.

        Raises:
            EngineError: the model hangs.
        """
        trouble = self._trouble()
        if trouble is not None:
            raise EngineError(trouble)

    def _trouble(self) -> str | None:
        began_s = self._began_s
        if began_s is None or self._clock() - began_s <= MAX_CALL_S:
            return None
        return f"the {self._what} has been at one batch for {self._clock() - began_s:.0f} seconds"

    async def _work(self) -> None:
        """Call the model until no item waits."""
        while self._urgent or self._others:
            batch = self._next_batch()
            if batch:
                await self._answer(batch)

    def _next_batch(self) -> list[_Waiting[Item, Result]]:
        """Take items for one call, without those that nobody waits for any more."""
        batch: list[_Waiting[Item, Result]] = []
        is_other_due = self._is_other_due
        if is_other_due:
            self._take_from(self._others, batch, 1)
        self._take_from(self._urgent, batch, self._max_batch)
        num_before = len(batch)
        self._take_from(self._others, batch, self._max_batch)
        # Urgent items may keep coming, and leave no room: every second call begins with an item that is not urgent.
        self._is_other_due = not is_other_due and bool(self._others) and len(batch) == num_before
        return batch

    def _take_from(
        self, requests: list[_Asked[Item, Result]], batch: list[_Waiting[Item, Result]], max_size: int
    ) -> None:
        """Fill a batch: with an item of the oldest request, which is not overtaken for ever, then of the smallest.

        If an item of the oldest leaves no room, every second call begins with the smallest.
        """
        if not requests:
            return
        oldest, num_before, others = requests[0], len(batch), requests[1:]
        num_others = sum(len(request.items) for request in others)
        if not oldest.is_held_back:
            self._take(oldest, batch, min(max_size, len(batch) + 1))
        for request in sorted(requests, key=attrgetter("num_chars")):
            self._take(request, batch, max_size)
        if len(batch) > num_before:
            oldest.is_held_back = 0 < num_others == sum(len(request.items) for request in others)
        requests[:] = [request for request in requests if request.items]

    def _take(self, request: _Asked[Item, Result], batch: list[_Waiting[Item, Result]], max_size: int) -> None:
        """Move items to a batch until it has `max_size` or is full."""
        chars_left = MAX_CALL_CHARS - sum(waiting.num_chars for waiting in batch)
        while request.items and len(batch) < min(max_size, self._max_batch):
            waiting = request.items[0]
            if not waiting.result.cancelled():
                chars_left -= waiting.num_chars
                if batch and chars_left < 0:
                    return
                batch.append(waiting)
            request.items.popleft()
            request.num_chars -= waiting.num_chars

    async def _answer(self, batch: list[_Waiting[Item, Result]]) -> None:
        items = [waiting.item for waiting in batch]
        num_chars, began_s = sum(waiting.num_chars for waiting in batch), self._clock()
        is_full = bool(self._urgent or self._others)
        call = asyncio.get_running_loop().run_in_executor(self._thread, self._timed, items)
        self._num_called_chars = num_chars
        await asyncio.wait([call])
        self._num_called_chars = 0
        took_s = self._clock() - began_s
        # Whatever the call, if it was faster than expected, the pace was learned from one that stood still.
        if is_full or took_s < self._pace.seconds(num_chars):
            self._pace.note(num_chars, took_s)
        error = call.exception()
        if error is not None and len(batch) > 1:
            # One item may have failed the call for all, and these may be of several requests.
            for waiting in batch:
                if not waiting.result.done():
                    await self._answer([waiting])
            return
        for place, waiting in enumerate(batch):
            if waiting.result.done():
                continue  # nobody waits for it any more
            if error is not None:
                waiting.result.set_exception(error)
            else:
                waiting.result.set_result(call.result()[place])

    def _timed(self, items: list[Item]) -> Sequence[Result]:
        self._began_s = self._clock()
        try:
            return self._call(items)
        finally:
            self._began_s = None
