"""What became of one request in the engine, for whoever asks later: when it waited, computed, was put back, ended.

A decode costs the host nothing here. What the device gave a request is its share of each step's time by tokens: a
decoding row has one token in every step, so that its share is the growth of one sum, read at its first and last step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from engine.step import StepPlan, StepRow

MAX_CHUNKS = 64
"""Of one request that are told one by one; those after them become part of the last."""


class Chunk(NamedTuple):
    """A step that computed a part of the prompt: seconds since the request was queued, and its tokens."""

    start_s: float
    end_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """One request that has ended. Times are seconds since it was queued; None where it never got that far.

    Attributes:
        queued_unix_s: when it was queued, Unix time.
        chunks: of its prompt, and of what was computed anew after a pre-emption.
        device_s: its share of the steps that it was in.
        reason: of `engine.request.FinishReason`.
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
        """From its arrival to a row in the batch."""
        return self.admitted_s

    @property
    def prefill_s(self) -> float | None:
        """From a row in the batch to the first token."""
        if self.admitted_s is None or self.first_token_s is None:
            return None
        return self.first_token_s - self.admitted_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return None if self.first_token_s is None else self.end_s - self.first_token_s


@dataclass(slots=True, kw_only=True)
class TraceNotes:
    """What is noted of a request while it lives; the scheduler's alone.

    Attributes:
        decoding_since: the `StepClock.token_s` at which it began to decode; None while it does not.
    """

    chunks: list[Chunk] = field(default_factory=list)
    num_preemptions: int = 0
    device_s: float = 0.0
    decoding_since: float | None = None

    def note_chunk(self, chunk: Chunk, device_s: float) -> None:
        """Note a part of the prompt that was computed."""
        self.device_s += device_s
        if len(self.chunks) < MAX_CHUNKS:
            self.chunks.append(chunk)
        else:
            last = self.chunks[-1]
            self.chunks[-1] = Chunk(last.start_s, chunk.end_s, last.num_tokens + chunk.num_tokens)

    def stop_decoding(self, clock: StepClock) -> None:
        """Settle what the decode steps have taken."""
        if self.decoding_since is not None:
            self.device_s += clock.token_s - self.decoding_since
            self.decoding_since = None


class StepClock:
    """How long each step took the device, and what that makes for a token.

    Attributes:
        token_s: sum over all steps of their seconds divided by their tokens.
    """

    def __init__(self) -> None:
        self.token_s = 0.0
        self._planned_s: dict[int, float] = {}
        self._start_s = self._end_s = self._free_s = 0.0
        self._per_token_s = 0.0

    def begin(self, step_id: int, now_s: float) -> None:
        """Note that a plan is made, and will be handed to the device at once."""
        self._planned_s[step_id] = now_s

    def end(self, plan: StepPlan, now_s: float) -> None:
        """Note that its results are there; it began when it was made, or when the one before it had ended."""
        self._start_s, self._end_s = max(self._planned_s.pop(plan.step_id, now_s), self._free_s), now_s
        put_aside = [step_id for step_id in self._planned_s if step_id < plan.step_id]
        for step_id in put_aside:
            # What was made before it and is not done: for that it was no time at all.
            self._planned_s[step_id] += now_s - self._start_s
        if not put_aside:
            self._free_s = now_s
        self._per_token_s = (now_s - self._start_s) / plan.num_tokens
        self.token_s += self._per_token_s

    def note(self, notes: TraceNotes, row: StepRow, queued_s: float) -> None:
        """Note a row of the step that has just ended, unless it was a decode."""
        if notes.decoding_since is not None:
            if row.num_tokens > 1:
                # Its share grows by one token a step; what was forced upon it comes on top.
                notes.device_s += self._per_token_s * (row.num_tokens - 1)
            return
        chunk = Chunk(self._start_s - queued_s, self._end_s - queued_s, row.num_tokens)
        notes.note_chunk(chunk, self._per_token_s * row.num_tokens)
        if row.samples:
            notes.decoding_since = self.token_s
