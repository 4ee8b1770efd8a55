"""The timeline of one request in the engine, for later inspection: when it waited, computed, was preempted, ended.

Decodes cost the host nothing here. A request's device time is its share, by tokens, of each step's time: a decoding row
has one token in every step, so its share is the growth of a running sum, read at its first and last step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.step import StepPlan, StepRow

MAX_CHUNKS = 64
"""Maximum number of chunks recorded per request; later ones are merged into the last."""


class Chunk(NamedTuple):
    """A step that computed a part of the prompt; times are seconds since the request was queued."""

    start_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """The trace of an ended request. Times are seconds since it was queued; None if it never got that far.

    Attributes:
        queued_unix_s: Unix time at which it was queued.
        chunks: chunks of its prompt, and of what was recomputed after a preemption.
        device_s: its share of the time of the steps that it was in.
        reason: value of an `engine.request.FinishReason`.
    """

    queued_unix_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float
    chunks: tuple[Chunk, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    device_s: float
    reason: str

    @property
    def queue_s(self) -> float | None:
        """Time from arrival to admission."""
        return self.admitted_s

    @property
    def prefill_s(self) -> float | None:
        """Time from admission to the first token."""
        if self.admitted_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.admitted_s

    @property
    def decode_s(self) -> float | None:
        """Time from the first token to the end."""
        return None if self.first_token_s is None else self.end_s - self.first_token_s


@dataclass(slots=True, kw_only=True)
class TraceNotes:
    """Trace data of a live request; used only by the scheduler.

    Attributes:
        decoding_since: the value of `StepClock.token_s` when it started to decode; None while it does not.
    """

    chunks: list[Chunk] = field(default_factory=list)
    num_preemptions: int = 0
    device_s: float = 0.0
    decoding_since: float | None = None

    def note_chunk(self, chunk: Chunk, device_s: float) -> None:
        """Record a computed chunk of the prompt."""
        self.device_s += device_s
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = Chunk(last.start_s, chunk.end_s, last.num_tokens + chunk.num_tokens)

    def stop_decoding(self, clock: StepClock) -> None:
        """Add the device time of the decode steps."""
        if self.decoding_since is not None:
            self.device_s += clock.token_s - self.decoding_since
            self.decoding_since = None


class StepClock:
    """Measures the time of each step.

    Attributes:
        step_s: seconds of the newest finished step, from when it was submitted or the device became free.
        whole_s: the same with the host's work since the step before it.
        token_s: sum over all steps of `step_s` per token.
    """

    def __init__(self) -> None:
        self.step_s = self.whole_s = self.token_s = 0.0
        self._planned_s: dict[int, float] = {}
        self._start_s = self._end_s = self._free_s = 0.0
        self._per_token_s = 0.0

    def rest(self, now_s: float) -> None:
        """Record that there was nothing to compute until now; that time counts towards no step."""
        self._free_s = max(self._free_s, now_s)

    def begin(self, step_id: int, now_s: float) -> None:
        """Record that a plan was made; it is submitted to the device at once."""
        self._planned_s[step_id] = now_s

    def end(self, plan: StepPlan, now_s: float) -> None:
        """Record that a plan's results are available."""
        self._start_s, self._end_s = max(self._planned_s.pop(plan.step_id, now_s), self._free_s), now_s
        self.step_s = now_s - self._start_s
        put_aside = [step_id for step_id in self._planned_s if step_id < plan.step_id]
        if put_aside:
            # An earlier step was put aside for this one, whose time must not count towards it.
            self.whole_s = self.step_s
            self._free_s += self.step_s
            for step_id in put_aside:
                self._planned_s[step_id] += self.step_s
        else:
            self.whole_s, self._free_s = now_s - self._free_s, now_s
        self._per_token_s = self.step_s / plan.num_tokens
        self.token_s += self._per_token_s

    def note(self, notes: TraceNotes, row: StepRow, queued_s: float) -> None:
        """Record a row of the step that has just ended; a plain decode needs no record."""
        if notes.decoding_since is not None:
            if row.num_tokens > 1:
                # The running sum counts one token per step; forced and draft tokens are added here.
                notes.device_s += self._per_token_s * (row.num_tokens - 1)
            return
        chunk = Chunk(self._start_s - queued_s, self._end_s - queued_s, row.num_tokens)
        notes.note_chunk(chunk, self._per_token_s * row.num_tokens)
        if row.samples:
            notes.decoding_since = self.token_s
