"""The timeline of one request in the engine, for later inspection: when it waited, computed, was preempted, ended.

Decodes cost the host nothing here. A request's device time is its share, by tokens, of each step's time: a decoding row
has one token in every step, so its share is the growth of a running sum, read at its first and last step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.step import StepRow
from engine.step_clock import StepClock

MAX_CHUNKS = MAX_PREEMPTIONS = 64
"""Maximum number of chunks, and of preemptions, recorded per request; later ones are merged into the last."""


class Preemption(NamedTuple):
    """A time in which the request waited again; seconds since it was queued first."""

    start_s: float
    end_s: float


class PrefillChunk(NamedTuple):
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
        preemptions: from each preemption to the next admission, or to the end. Traces are pickled by the order of their
            fields, so it comes last: gateways read those of engines of the release before.
    """

    queued_unix_s: float
    admitted_s: float | None
    first_token_s: float | None
    end_s: float
    chunks: tuple[PrefillChunk, ...]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    device_s: float
    reason: str
    preemptions: tuple[Preemption, ...]

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
        preempted_at_s: monotonic time of its preemption; None unless it waits after one.
    """

    chunks: list[PrefillChunk] = field(default_factory=list)
    preemptions: list[Preemption] = field(default_factory=list)
    num_preemptions: int = 0
    device_s: float = 0.0
    decoding_since: float | None = None
    preempted_at_s: float | None = None

    def note(self, row: StepRow, clock: StepClock, queued_s: float) -> None:
        """Record a row of the step that has just ended; a plain decode needs no record."""
        if self.decoding_since is not None:
            if row.num_tokens > 1:
                # The running sum counts one token per step; forced and draft tokens are added here.
                self.device_s += clock.per_token_s * (row.num_tokens - 1)
            return
        self.device_s += clock.per_token_s * row.num_tokens
        self.note_chunk(PrefillChunk(clock.start_s - queued_s, clock.end_s - queued_s, row.num_tokens))
        if row.samples:
            self.decoding_since = clock.token_s

    def note_chunk(self, chunk: PrefillChunk) -> None:
        """Record a computed chunk of the prompt."""
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = PrefillChunk(last.start_s, chunk.end_s, last.num_tokens + chunk.num_tokens)

    def begin_preemption(self, now_s: float) -> None:
        """Record that the request waits again."""
        self.num_preemptions += 1
        self.preempted_at_s = now_s

    def end_preemption(self, now_s: float, queued_s: float) -> None:
        """Record that the request waits no longer, if it did."""
        if self.preempted_at_s is None:
            return
        preemption = Preemption(self.preempted_at_s - queued_s, now_s - queued_s)
        if len(self.preemptions) == MAX_PREEMPTIONS:
            preemption = preemption._replace(start_s=self.preemptions.pop().start_s)
        self.preemptions.append(preemption)
        self.preempted_at_s = None

    def stop_decoding(self, clock: StepClock) -> None:
        """Add the device time of the decode steps."""
        if self.decoding_since is not None:
            self.device_s += clock.token_s - self.decoding_since
            self.decoding_since = None
