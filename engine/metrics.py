"""The engine's metrics: plain numbers, exported by its host."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapters.loads import AdapterLoads
from engine.request import FinishReason, RequestId
from engine.trace import RequestTrace

if TYPE_CHECKING:
    from engine.scheduling.live_request import LiveRequest

MAX_TRACES = 4096
SIZE_BOUNDS = tuple(2**power for power in range(15))


@dataclass(slots=True, kw_only=True)
class SchedulerCounters:
    """Counts since the start, written only by the engine's thread.

    Attributes:
        prefix_queries, prefix_hits: tokens looked up in, and served from, the prefix cache when requests are first
            admitted; hits of readmitted preempted requests are not counted.
        forced_tokens: of `generation_tokens`, those that a grammar forced and that were not sampled.
        num_drafts, num_draft_tokens, num_accepted_tokens: drafts that were verified, their tokens, and how many of
            these were accepted.
        ended: traces of ended requests not drained yet, the newest `MAX_TRACES`.
        trace_by_id: traces of the `MAX_TRACES` newest ended requests, drained or not; any thread may read it.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    forced_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    ended_by_reason: dict[str, int] = field(default_factory=dict)
    ended: deque[RequestTrace] = field(default_factory=lambda: deque(maxlen=MAX_TRACES))
    trace_by_id: dict[RequestId, RequestTrace] = field(default_factory=dict)

    def count_admission(self, live: LiveRequest) -> None:
        """Count a request's first admission."""
        self.prefix_queries += live.num_tokens
        self.prefix_hits += live.num_computed
        self.prompt_tokens += len(live.request.prompt_ids)

    def count_end(self, live: LiveRequest, reason: FinishReason, now_s: float) -> None:
        """Count one ended request and keep its trace."""
        self.ended_by_reason[reason.value] = self.ended_by_reason.get(reason.value, 0) + 1
        trace = live.trace(reason, now_s, time.time())
        self.ended.append(trace)
        self.trace_by_id[live.request.request_id] = trace
        if len(self.trace_by_id) > MAX_TRACES:
            # Dictionaries keep insertion order: the first entry is the oldest.
            del self.trace_by_id[next(iter(self.trace_by_id))]


@dataclass(slots=True, kw_only=True)
class Sizes:
    """A histogram of sizes.

    Attributes:
        counts: number of sizes up to each of `SIZE_BOUNDS`, above the one before it; last, of all larger ones.
        total: sum of the sizes.
    """

    counts: list[int] = field(default_factory=lambda: [0] * (len(SIZE_BOUNDS) + 1))
    total: int = 0

    def add(self, size: int) -> None:
        """Count one."""
        self.counts[bisect_left(SIZE_BOUNDS, size)] += 1
        self.total += size

    def copy(self) -> Sizes:
        """Return a copy that stays as it is."""
        return Sizes(counts=list(self.counts), total=self.total)


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Seconds that the host has spent in each part of all steps so far.

    Attributes:
        schedule_s: planning, which includes the steps of a draft model.
        wait_s: waiting for results of the device. If the host itself computes `forward_s` and `sample_s`, this is only
            the sampling after draft tokens.
    """

    schedule_s: float = 0.0
    prepare_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0
    wait_s: float = 0.0
    emit_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSnapshot:
    """The engine at one moment; counts are since its start.

    Attributes:
        step_requests, step_tokens: how many requests, and how many tokens of them, the steps computed.
        last_progress_s: monotonic time at which the last step ended, or at which the engine was last idle.
        num_blocks: blocks of the KV cache per block table, on average.
        kv_usage: share of the cache's blocks held by requests, 0 to 1.
        counters: a copy of the numbers; `ended` and `trace_by_id` are shared with the live counters.
        refused_by_reason: number of refused requests by `engine.errors.OverloadError.reason`.
        stored_tokens, fetched_tokens: tokens whose blocks were copied to the tiers below the cache, and back.
        ended: requests that ended since the previous snapshot that drained them.
    """

    num_running: int
    num_waiting: int
    step_requests: Sizes
    step_tokens: Sizes
    last_progress_s: float
    kv_usage: float
    num_blocks: int
    block_tokens: int
    counters: SchedulerCounters
    refused_by_reason: dict[str, int]
    step_times: StepTimes
    num_resident_adapters: int
    adapter_loads: AdapterLoads
    stored_tokens: int = 0
    fetched_tokens: int = 0
    ended: tuple[RequestTrace, ...] = ()

    @property
    def num_steps(self) -> int:
        """Steps since the start."""
        return sum(self.step_tokens.counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """The load that a new request would meet: how long it would wait, and how much of its prompt is cached.

    Attributes:
        queued_tokens: prompt tokens of accepted requests left to compute, less the expected cache hits of waiting ones.
        prefill_tokens_per_s, step_s: measured; 0 before the first measurement.
        stalled_s: time since the last finished step if there is work, else 0.
        num_ended: requests that have ended since the start.
        landmark_blocks: stride of `landmarks` in blocks; 0 without a prefix cache.
        landmarks: see `engine.cache.prefix_index.Landmarks`.
    """

    queued_tokens: int
    num_running: int
    num_waiting: int
    max_running: int
    prefill_tokens_per_s: float
    step_s: float
    stalled_s: float
    num_ended: int
    block_tokens: int
    landmark_blocks: int
    landmarks: frozenset[int]
