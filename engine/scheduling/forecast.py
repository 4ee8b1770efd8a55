"""Predicts when a request that arrived now would start, and when it would end. Pure: standard library only.

Simulates requests in the order in which the scheduler serves them. Each takes a row and blocks once they are free and
all requests before it have theirs, computes its prompt once those before it have computed theirs, and then draws a
token in every step.

    steps    0 ............ start ........ first ................ end
             [ waits for a row, blocks )[ prompt )[ one token each step )

Every step is costed as if all requests were in the batch, and every request is charged the prompts of all of them. So
a forecast errs on the late side: its times are kept as long as nobody overtakes, and no later request is admitted that
would break them (`Forecast.breaks_s`). The time to load adapters is not included.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from engine.scheduling.step_costs import StepCosts


class Load(NamedTuple):
    """Remaining work of one request.

    Attributes:
        prompt_tokens: tokens to compute before the next one is drawn; at most 1 if the request decodes.
        output_tokens: tokens still to be drawn, at least 1.
        num_blocks: cache blocks that it holds when it ends.
        deadline_s: monotonic time by which it must end; None for no deadline.
        num_pairs: pairs of one of the tokens to compute and one before it.
    """

    prompt_tokens: float
    output_tokens: int
    num_blocks: int
    deadline_s: float | None = None
    num_pairs: float = 0.0


class Backlog(NamedTuple):
    """The work served before a request.

    Attributes:
        running: requests that hold rows.
        waiting: in the order in which they will get rows.
        takes_row: whether a flow with more than its share of the rows yields one to the request.
        num_steps, num_prompt_tokens: work submitted to the device that the loads already count as done.
    """

    running: tuple[Load, ...] = ()
    waiting: tuple[Load, ...] = ()
    takes_row: bool = False
    num_steps: int = 0
    num_prompt_tokens: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether the request would have the engine to itself."""
        return not (self.running or self.waiting)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapacity:
    """The engine's rows, its cache blocks, and the prompt tokens of a step in which every row also decodes."""

    num_rows: int
    num_blocks: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Predicted times of a request, in seconds from now.

    Attributes:
        start_s: until its prompt starts.
        end_s: until its last token.
        alone_s: until its last token if it had the engine to itself.
        breaks_s: until the last of those requests ends whose deadlines would be kept without this request but not with
            it; 0 if there are none.
    """

    start_s: float
    end_s: float
    alone_s: float
    breaks_s: float


class _Place(NamedTuple):
    start: float
    end: int


def forecast(load: Load, backlog: Backlog, capacity: EngineCapacity, costs: StepCosts, now_s: float) -> Forecast:
    """Predict the times of a request in O(n log rows), n being the length of the backlog."""
    before = (*backlog.running, *backlog.waiting)
    *places, place = _places(load, backlog, capacity)
    tokens = backlog.num_prompt_tokens + sum(other.prompt_tokens for other in before if other.prompt_tokens > 1)
    num_pairs = sum(other.num_pairs for other in before if other.prompt_tokens > 1)
    prompt_s, own_prompt_s = costs.prompt_s(tokens, num_pairs), _prompt_s(load, costs)
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
    # The request misses the step in flight.
    missed = backlog.num_steps + (0 if backlog.is_empty else 1)
    return Forecast(
        start_s=(missed + place.start) * step_s + prompt_s,
        end_s=(missed + place.end) * step_s + prompt_s + own_prompt_s,
        alone_s=least_s(load, capacity, costs),
        breaks_s=breaks_s,
    )


def least_s(load: Load, capacity: EngineCapacity, costs: StepCosts, num_rows: int = 1) -> float:
    """Return the seconds of a request that starts at once, in steps of `num_rows` rows; 1 means it runs alone."""
    place = _place(load, 0, 0.0, capacity)
    return place.end * costs.step_s(num_rows) + _prompt_s(load, costs)


def _places(load: Load, backlog: Backlog, capacity: EngineCapacity) -> Iterator[_Place]:
    """Yield when each request is served, in steps from now; the asking request comes last."""
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
        while ends and (len(ends) >= capacity.num_rows or num_used + other.num_blocks > capacity.num_blocks):
            end, num_blocks = heapq.heappop(ends)
            num_used -= num_blocks
            if not (other is load and backlog.takes_row):
                now = end
        place = _place(other, now, prompts_done, capacity)
        prompts_done = max(prompts_done, place.start + _prompt_steps(other, capacity))
        heapq.heappush(ends, (place.end, other.num_blocks))
        num_used += other.num_blocks
        yield place


def _place(load: Load, row_free: int, prompts_done: float, capacity: EngineCapacity) -> _Place:
    if load.prompt_tokens <= 1:
        return _Place(row_free, row_free + load.output_tokens)
    start = max(row_free, prompts_done)
    # The last step of the prompt draws the first token.
    return _Place(start, ceil(start + _prompt_steps(load, capacity)) + load.output_tokens - 1)


def _prompt_s(load: Load, costs: StepCosts) -> float:
    # A single token counts as a decoding row.
    return costs.prompt_s(load.prompt_tokens, load.num_pairs) if load.prompt_tokens > 1 else 0.0


def _prompt_steps(load: Load, capacity: EngineCapacity) -> float:
    return load.prompt_tokens / capacity.prompt_tokens if load.prompt_tokens > 1 else 0.0
