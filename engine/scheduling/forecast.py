"""When a request would get its first token and its last, if it came now. Pure: standard library only.

Requests are played forward in the order in which the scheduler serves them: every one takes a row and blocks as soon as
they are free and all before it have theirs, computes its prompt when those before it have computed theirs, and then
draws a token in every step.

    steps    0 ............ start ........ first ................ end
             [ waits for a row, blocks )[ prompt )[ one token each step )

Steps become seconds by what a step costs with all of them in the batch, and all their prompts are counted for each of
them. So a forecast is late rather than early: what it promises is kept if nobody overtakes, and nobody who comes later
is let in who would break it (`Forecast.breaks_s`). Adapters that are still to be loaded are not foreseen.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from engine.scheduling.step_costs import StepCosts


class Load(NamedTuple):
    """What is left to do for one request.

    Attributes:
        prompt_tokens: to be computed before the next token is drawn; at most 1 where it decodes.
        output_tokens: still to be drawn, at least 1.
        num_blocks: of the cache, as it ends.
        deadline_s: monotonic time by which it has to end; None for never.
    """

    prompt_tokens: float
    output_tokens: int
    num_blocks: int
    deadline_s: float | None = None


class Backlog(NamedTuple):
    """Who is served before a request.

    Attributes:
        running: they hold rows.
        waiting: in the order in which they will get rows.
        takes_row: whether a flow with more than its share of the rows gives one up for the request.
        num_steps, num_prompt_tokens: handed to the device and counted as done, though they are not.
    """

    running: tuple[Load, ...] = ()
    waiting: tuple[Load, ...] = ()
    takes_row: bool = False
    num_steps: int = 0
    num_prompt_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the request would have the engine for itself."""
        return not (self.running or self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the engine has: rows, blocks of the cache, and prompt tokens that a step computes beside full rows."""

    num_rows: int
    num_blocks: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Seconds from now.

    Attributes:
        start_s: until its prompt is begun.
        first_s, end_s: until its first token, and its last.
        alone_s: until its last, if it were alone.
        breaks_s: until the last one ends whose deadline could be kept, and could not if the request came in; 0 where
            there is none.
    """

    start_s: float
    first_s: float
    end_s: float
    alone_s: float
    breaks_s: float


class _Place(NamedTuple):
    start: float
    first: int
    end: int


def forecast(load: Load, backlog: Backlog, capacity: Capacity, costs: StepCosts, now_s: float) -> Forecast:
    """Foretell what becomes of a request; linear in the backlog, but for the logarithm of the rows."""
    before = (*backlog.running, *backlog.waiting)
    *places, place = _places(load, backlog, capacity)
    tokens = backlog.num_prompt_tokens + sum(other.prompt_tokens for other in before if other.prompt_tokens > 1)
    prompt_s, own_prompt_s = costs.prompt_s(tokens), _prompt_s(load, costs)
    without_s = costs.step_s(min(len(before), capacity.num_rows))
    step_s = costs.step_s(min(len(before) + 1, capacity.num_rows))
    breaks_s = 0.0
    for other, ends in zip(before, places, strict=True):
        if other.deadline_s is not None:
            steps = backlog.num_steps + ends.end
            kept_s = steps * without_s + prompt_s
            left_s = other.deadline_s - now_s
            if kept_s <= left_s < steps * step_s + prompt_s + own_prompt_s:
                breaks_s = max(breaks_s, kept_s)
    # It misses the step that is under way.
    missed = backlog.num_steps + (0 if backlog.is_empty else 1)
    return Forecast(
        start_s=(missed + place.start) * step_s + prompt_s,
        first_s=(missed + place.first) * step_s + prompt_s + own_prompt_s,
        end_s=(missed + place.end) * step_s + prompt_s + own_prompt_s,
        alone_s=least_s(load, capacity, costs),
        breaks_s=breaks_s,
    )


def least_s(load: Load, capacity: Capacity, costs: StepCosts, num_rows: int = 1) -> float:
    """Return what a request takes that begins at once, in steps of so many rows; for itself where it is one."""
    place = _place(load, 0, 0.0, capacity)
    return place.end * costs.step_s(num_rows) + _prompt_s(load, costs)


def _places(load: Load, backlog: Backlog, capacity: Capacity) -> Iterator[_Place]:
    """Yield where everyone comes, in steps from now; the request itself is the last."""
    prompts_done = 0.0
    ends: list[tuple[int, int]] = []
    now = num_used = 0
    for other in backlog.running:
        place = _place(other, 0, prompts_done, capacity)
        prompts_done += _prompt_steps(other, capacity)
        heapq.heappush(ends, (place.end, other.num_blocks))
        num_used += other.num_blocks
        yield place
    for other in (*backlog.waiting, load):
        needed = min(other.num_blocks, capacity.num_blocks)
        while ends and (len(ends) >= capacity.num_rows or num_used + needed > capacity.num_blocks):
            end, num_blocks = heapq.heappop(ends)
            num_used -= num_blocks
            if not (other is load and backlog.takes_row):
                now = max(now, end)
        place = _place(other, now, prompts_done, capacity)
        prompts_done = max(prompts_done, place.start + _prompt_steps(other, capacity))
        heapq.heappush(ends, (place.end, needed))
        num_used += needed
        yield place


def _place(load: Load, row_free: int, prompts_done: float, capacity: Capacity) -> _Place:
    if load.prompt_tokens <= 1:
        return _Place(row_free, row_free + 1, row_free + load.output_tokens)
    start = max(row_free, prompts_done)
    first = ceil(start + _prompt_steps(load, capacity))
    return _Place(start, first, first + load.output_tokens - 1)


def _prompt_s(load: Load, costs: StepCosts) -> float:
    # One token is a row among those that decode.
    return costs.prompt_s(load.prompt_tokens) if load.prompt_tokens > 1 else 0.0


def _prompt_steps(load: Load, capacity: Capacity) -> float:
    return load.prompt_tokens / capacity.prompt_tokens if load.prompt_tokens > 1 else 0.0
