"""The timeline of one answer: recorded by the gateway as it proceeds, joined with the engine's trace on request.

Times are seconds since the request, with its body, had reached the gateway. Engines report wall-clock times, so across
machines the two parts match only as well as the machines' clocks.
"""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.request import RequestId
from engine.trace import RequestTrace

MAX_KEPT = 256
"""Client requests whose answers a gateway remembers, and as many refused ones besides."""
MAX_ANSWERS = 1024
"""Most recent answers remembered per client request id: a client may give all of its requests one id."""
MAX_TIMELINES = 4096
"""Answers that a gateway remembers for all ids together: those of the longest ones take 50 MB."""
MAX_ARRIVALS = MAX_ATTEMPTS = 1024
"""Bounds per answer on recorded token arrivals, and on attempts that engines are asked about."""
IN_PROGRESS = "in_progress"
CANCELLED = "cancelled"
GOOD_OUTCOMES = ("stop", "length", "tool_calls", "content_filter", CANCELLED)
"""Outcomes that are not failures."""
_REFUSED_OUTCOMES = ("RequestError", "OverloadError", "UnavailableError")
"""Outcomes of answers that were not begun, unless they have tokens."""


TraceSource = Callable[[str, Sequence[RequestId]], Awaitable[Mapping[RequestId, RequestTrace]]]
"""Maps a base model and attempts to its engines' traces of them."""


class Stage(NamedTuple):
    """A named span of time within an answer."""

    name: str
    start_s: float
    end_s: float


class Arrival(NamedTuple):
    """Tokens that arrived together."""

    at_s: float
    num_tokens: int


class Arrivals:
    """The arrivals of one answer, in order; 12 bytes each, as a gateway remembers those of thousands of answers."""

    __slots__ = ("_at_s", "_num_tokens")

    def __init__(self, arrivals: Iterable[Arrival] = ()) -> None:
        self._at_s, self._num_tokens = array("d"), array("I")
        for arrival in arrivals:
            self.append(arrival)

    def __len__(self) -> int:
        return len(self._at_s)

    def __iter__(self) -> Iterator[Arrival]:
        return map(Arrival, self._at_s, self._num_tokens)

    def append(self, arrival: Arrival) -> None:
        """Add the latest one."""
        self._at_s.append(arrival.at_s)
        self._num_tokens.append(arrival.num_tokens)


@dataclass(slots=True, kw_only=True)
class Timeline:
    """One answer.

    Attributes:
        request_id: id of the answer; the part before its last dot is the client's.
        model: the requested name.
        operation: the kind of request, named by OpenTelemetry's conventions.
        adapter: digest of its content, empty for a base model.
        arrived_unix_s: Unix time of arrival.
        called_s_by_attempt: when an engine was called, by the id under which it knows the answer: several if a replica
            was lost, one per expansion of a beam search, one per input of an embedding request.
        outcome: a finish reason, the type of an error, "cancelled", or "in_progress".
        first_token_s, first_text_s: when the engine's first token came, and when the first text was shown.
        detokenize_s: time in which the gateway made text of tokens, in all.
        trace_parent: the client's `traceparent` header.
    """

    request_id: str
    model: str
    base: str
    operation: str = "chat"
    adapter: str = ""
    tenant: str = ""
    arrived_unix_s: float
    stages: list[Stage] = field(default_factory=list)
    called_s_by_attempt: dict[RequestId, float] = field(default_factory=dict)
    arrivals: Arrivals = field(default_factory=Arrivals)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_tokens: int = 0
    first_token_s: float | None = None
    first_text_s: float | None = None
    detokenize_s: float = 0.0
    end_s: float | None = None
    outcome: str = IN_PROGRESS
    trace_parent: str = ""

    @property
    def client_id(self) -> str:
        """The id that the client knows."""
        return self.request_id.rpartition(".")[0] or self.request_id

    @property
    def was_refused(self) -> bool:
        """Whether it was not begun."""
        return self.outcome in _REFUSED_OUTCOMES and not self.num_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time in seconds between tokens after the first; None if unfinished or fewer than two tokens."""
        if self.first_token_s is None or self.end_s is None or self.num_tokens < 2:
            return None
        return (self.end_s - self.first_token_s) / (self.num_tokens - 1)


class Reception:
    """What happens to a client's request before its answers begin; made when the request arrives.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._arrived_s = clock()
        self.stage_by_name: dict[str, Stage] = {}

    @property
    def now_s(self) -> float:
        """Seconds since the request arrived."""
        return self._clock() - self._arrived_s

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Record the duration of a `with` block, however it ends; only the first of each name to end counts."""
        return self.timed(name, lambda stage: self.stage_by_name.setdefault(name, stage))

    @contextmanager
    def timed(self, name: str, note: Callable[[Stage], object]) -> Iterator[None]:
        """Pass a `with` block to `note` as a stage, however it ends."""
        start_s = self.now_s
        try:
            yield
        finally:
            note(Stage(name, start_s, self.now_s))


class Recorder:
    """Records one timeline.

    Args:
        on_end: called once with the timeline, when its answer ends and before its client learns of it.
        reception: of the client's request, which its answers share.
    """

    def __init__(
        self, timeline: Timeline, on_end: Callable[[Timeline], None] = lambda _: None, *, reception: Reception
    ) -> None:
        self.timeline = timeline
        self._on_end = on_end
        self._reception = reception
        timeline.stages += reception.stage_by_name.values()

    @property
    def now_s(self) -> float:
        """Seconds since the request arrived."""
        return self._reception.now_s

    def left_s(self, timeout_s: float | None) -> float | None:
        """Return the seconds left of a time limit that began when the request arrived; None without a limit."""
        return None if timeout_s is None else max(0.0, timeout_s - self.now_s)

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Record the duration of a `with` block, however it ends."""
        return self._reception.timed(name, self.timeline.stages.append)

    def note_attempt(self, request_id: RequestId) -> None:
        """Record the id under which an engine will know the answer, or a part of it, right before the call."""
        if len(self.timeline.called_s_by_attempt) < MAX_ATTEMPTS:
            self.timeline.called_s_by_attempt[request_id] = self.now_s

    def note_expansion(self, request_id: RequestId, num_tokens: int) -> None:
        """Record a call that expands a beam of `num_tokens` tokens, which come when the search is over."""
        self.note_attempt(request_id)
        self.timeline.num_tokens = num_tokens

    def note_tokens(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Record tokens that came from the engine."""
        timeline, now_s = self.timeline, self.now_s
        if timeline.first_token_s is None:
            timeline.first_token_s = now_s
            timeline.num_tokens = 0  # instead of those of a beam
        timeline.num_tokens += num_tokens
        timeline.num_cached_tokens = num_cached_tokens
        if num_tokens and len(timeline.arrivals) < MAX_ARRIVALS:
            timeline.arrivals.append(Arrival(now_s, num_tokens))

    def note_text(self) -> None:
        """Record that text is shown, which may be later than its tokens came; only the first call counts."""
        if self.timeline.first_text_s is None:
            self.timeline.first_text_s = self.now_s

    def end(self, outcome: str) -> None:
        """Record the end; only the first call counts."""
        if self.timeline.end_s is None:
            self.timeline.end_s = self.now_s
            self.timeline.outcome = outcome
            self._on_end(self.timeline)


class _Kept:
    """Timelines by the client's request id; the first to go are those of the id that was used longest ago."""

    def __init__(self) -> None:
        self._by_client_id: OrderedDict[str, deque[Timeline]] = OrderedDict()
        self._num_timelines = 0

    def add(self, timeline: Timeline) -> None:
        of_client = self._by_client_id.setdefault(timeline.client_id, deque())
        of_client.append(timeline)
        self._by_client_id.move_to_end(timeline.client_id)
        self._num_timelines += 1
        if len(of_client) > MAX_ANSWERS:
            self.pop(timeline.client_id, 1)
        elif self._num_timelines > MAX_TIMELINES:
            self.pop(next(iter(self._by_client_id)), 1)
        if len(self._by_client_id) > MAX_KEPT:
            self.pop(next(iter(self._by_client_id)))

    def get(self, client_id: str) -> Sequence[Timeline]:
        return self._by_client_id.get(client_id, ())

    def pop(self, client_id: str, count: int | None = None) -> list[Timeline]:
        """Forget and return the first timelines of an id, by default all of them."""
        of_client = self._by_client_id.get(client_id, deque())
        popped = [of_client.popleft() for _ in range(len(of_client) if count is None else count)]
        self._num_timelines -= len(popped)
        if not of_client:
            self._by_client_id.pop(client_id, None)
        return popped


class TimelineStore:
    """The timelines of a gateway's recent requests; refused ones are kept apart, so that they evict no others."""

    def __init__(self) -> None:
        self._begun, self._refused = _Kept(), _Kept()

    def add(self, timeline: Timeline) -> None:
        """Remember a timeline that has begun; it may still change."""
        self._begun.add(timeline)

    def set_apart(self, timeline: Timeline) -> None:
        """Move a timeline that was added to the refused ones."""
        for other in self._begun.pop(timeline.client_id):
            if other is not timeline:
                self._begun.add(other)
        self._refused.add(timeline)

    def find(self, client_id: str) -> list[Timeline]:
        """Return the answers to one client request, in start order."""
        found = [*self._begun.get(client_id), *self._refused.get(client_id)]
        return sorted(found, key=lambda timeline: timeline.arrived_unix_s)


async def ask_traces(
    asked: Iterable[tuple[str, Iterable[RequestId]]], source: TraceSource
) -> dict[RequestId, RequestTrace]:
    """Return the engines' traces of many answers, given as base models and attempts; each model is asked once."""
    attempts_by_base: dict[str, list[RequestId]] = {}
    for base, attempts in asked:
        attempts_by_base.setdefault(base, []).extend(attempts)
    found: dict[RequestId, RequestTrace] = {}
    for base, attempts in attempts_by_base.items():
        if attempts:
            found |= await source(base, attempts)
    return found


def with_engine_stages(timeline: Timeline, trace_by_attempt: Mapping[RequestId, RequestTrace]) -> list[Stage]:
    """Return all stages of an answer, including those in engines, in start order."""
    stages = list(timeline.stages)
    for attempt, called_s in timeline.called_s_by_attempt.items():
        trace = trace_by_attempt.get(attempt)
        if trace is not None:
            queued_s = trace.queued_unix_s - timeline.arrived_unix_s
            if timeline.end_s is not None:
                # Nor may one end after the answer, with a clock that is ahead or was set meanwhile.
                queued_s = min(queued_s, timeline.end_s - trace.end_s)
            # With an engine's clock that is behind, a stage must not begin before the engine was called.
            queued_s = max(called_s, queued_s)
            stages.append(Stage("route", called_s, queued_s))
            stages += _engine_stages(trace, queued_s)
    return sorted(stages, key=lambda stage: (stage.start_s, stage.end_s))


def _engine_stages(trace: RequestTrace, queued_s: float) -> Iterator[Stage]:
    yield Stage("queue", queued_s, queued_s + (trace.end_s if trace.admitted_s is None else trace.admitted_s))
    for chunk in trace.chunks:
        yield Stage(f"prefill of {chunk.num_tokens} tokens", queued_s + chunk.start_s, queued_s + chunk.end_s)
    if trace.first_token_s is not None:
        yield Stage("decode", queued_s + trace.first_token_s, queued_s + trace.end_s)
    # An engine of the release before does not tell of them.
    for preemption in getattr(trace, "preemptions", ()):
        yield Stage("preempted", queued_s + preemption.start_s, queued_s + preemption.end_s)
