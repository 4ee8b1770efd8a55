"""Replicas and sessions of a simulated fleet: queues, rows, caches and adapters as numbers; no model, no clock.

A replica prefills prompts in order at a fixed rate, assigns rows to decodes, keeps prefixes and adapters in LRU caches,
and reports like a real one. The numbers approximate an 8B model on one H200; their exact values matter less than that
all policies get the same ones.
"""

from __future__ import annotations

import heapq
import random
from collections import OrderedDict
from dataclasses import dataclass, field

from deployments.routing.asked import Asked, hash64
from deployments.routing.report import LoadReport
from loadtest.workloads import zipf_weights

CHUNK_TOKENS = 256
PREFILL_TOKENS_PER_S = 20_000.0
ROWS = 64
TOKEN_S = 0.02
CACHE_CHUNKS = 1500
DEVICE_ADAPTERS = 32
HOST_ADAPTERS = 128
ADAPTER_LOAD_S = 0.3
ADAPTER_COPY_S = 0.01
LOADERS = 2


@dataclass(slots=True)
class Turn:
    """One request of a session."""

    session: int
    adapter: int | None
    marks: tuple[int, ...]
    num_tokens: int
    num_output: int
    turns_left: int

    def asked(self, request_id: str) -> Asked:
        """Return it as the input of the replica choice."""
        return Asked(
            request_id=request_id,
            num_tokens=self.num_tokens,
            block_marks=self.marks,
            adapter=self.adapter,
        )

    def next(self, rng: random.Random) -> Turn:
        """Return the session's next request: the conversation so far and a new message."""
        num_tokens = self.num_tokens + self.num_output + rng.randint(50, 350)
        known = len(self.marks)
        more = [hash64(f"session {self.session} {i}") for i in range(known, (num_tokens - 1) // CHUNK_TOKENS)]
        return Turn(self.session, self.adapter, (*self.marks, *more), num_tokens, _output(rng), self.turns_left - 1)


class Sessions:
    """Conversations of a few turns each: 70% use an adapter, by Zipf's law; each starts with a shared system prompt."""

    def __init__(self, num_adapters: int, rng: random.Random) -> None:
        self._rng = rng
        self._adapters = range(num_adapters)
        self._cumulative = zipf_weights(num_adapters, 1.0)
        self._num = 0

    def first(self) -> Turn:
        """Return the first request of a new session."""
        rng = self._rng
        self._num += 1
        adapter = None
        if rng.random() < 0.7:
            (rank,) = rng.choices(self._adapters, cum_weights=self._cumulative)
            adapter = hash64(f"adapter {rank}")
        prompt = f"prompt of {adapter}" if adapter is not None else f"prompt {min(19, int(rng.expovariate(0.2)))}"
        system = [hash64(f"{prompt} {i}") for i in range(4)]
        num_turns = min(12, 1 + int(rng.expovariate(0.25)))
        return Turn(
            self._num, adapter, tuple(system), 4 * CHUNK_TOKENS + rng.randint(50, 250), _output(rng), num_turns - 1
        )


class Replica:
    """One replica: its caches and its scheduled work."""

    def __init__(self, replica_id: str) -> None:
        self.replica_id = replica_id
        self.num_loads = 0
        self._prefill_free_s = 0.0
        self._row_free_s = [0.0] * ROWS
        self._loader_free_s = [0.0] * LOADERS
        self._ends: list[float] = []
        self._chunks: OrderedDict[int, None] = OrderedDict()
        self._device: OrderedDict[int, float] = OrderedDict()
        self._host: OrderedDict[int, None] = OrderedDict()
        self._changed: dict[int, bool] = {}
        self._moved: dict[int, None] = {}
        self._seen_by_gateway: dict[int, list[str]] = {}
        self._is_told = False
        self._news = True

    def num_open(self, now_s: float) -> int:
        """Return the number of requests that have arrived and not ended."""
        while self._ends and self._ends[0] <= now_s:
            heapq.heappop(self._ends)
        return len(self._ends)

    def serve(self, turn: Turn, request_id: str, gateway: int, now_s: float) -> Served:
        """Accept a request, and return the times of its first and last token and its cached prompt tokens."""
        num_open = self.num_open(now_s)
        num_cached = self._take_prefix(turn)
        busy = min(1.0, num_open / ROWS)
        work_s = max(1, turn.num_tokens - num_cached) / PREFILL_TOKENS_PER_S * (1 + busy / 2)
        row_s = max(now_s, heapq.heappop(self._row_free_s))
        queue_s = max(now_s, self._prefill_free_s)
        self._prefill_free_s = queue_s + work_s
        first_s = max(queue_s, row_s, self._adapter_ready_s(turn.adapter, now_s)) + work_s + TOKEN_S
        end_s = first_s + turn.num_output * TOKEN_S * (1 + busy)
        heapq.heappush(self._row_free_s, end_s)
        heapq.heappush(self._ends, end_s)
        self._seen_by_gateway.setdefault(gateway, []).append(request_id)
        self._news = True
        return Served(first_s - now_s, end_s, num_cached)

    def reports(self, gateways: int, now_s: float) -> list[LoadReport]:
        """Return the current report for each gateway; empty if there is no news and no open request."""
        num_open = self.num_open(now_s)
        queued = int(max(0.0, self._prefill_free_s - now_s) * PREFILL_TOKENS_PER_S)
        if not self._news and not num_open:
            return []
        added = tuple(mark for mark, is_there in self._changed.items() if is_there)
        dropped = tuple(mark for mark, is_there in self._changed.items() if not is_there)
        is_whole = not self._is_told
        moved = self._moved
        found = [
            LoadReport(
                model="m",
                replica_id=self.replica_id,
                queued_tokens=queued,
                num_running=min(num_open, ROWS),
                num_waiting=max(0, num_open - ROWS),
                max_running=ROWS,
                num_gateways=gateways,
                block_tokens=CHUNK_TOKENS,
                landmark_blocks=1,
                prefill_tokens_per_s=PREFILL_TOKENS_PER_S / (1 + min(1.0, num_open / ROWS) / 2),
                step_s=TOKEN_S * (1 + min(1.0, num_open / ROWS)),
                turnover_s=150 * 2 * TOKEN_S / ROWS,
                adapter_load_s=ADAPTER_LOAD_S,
                is_whole=is_whole,
                landmarks_added=added,
                landmarks_dropped=dropped,
                adapters_on_device=tuple(mark for mark in moved if mark in self._device),
                adapters_coming=tuple(mark for mark in moved if mark in self._host and mark not in self._device),
                adapters_dropped=tuple(mark for mark in moved if mark not in self._host and mark not in self._device),
                seen=self._seen_by_gateway.pop(gateway, ()),
            )
            for gateway in range(gateways)
        ]
        self._changed.clear()
        self._moved.clear()
        self._is_told, self._news = True, False
        return found

    def _take_prefix(self, turn: Turn) -> int:
        depth = 0
        for mark in turn.marks:
            if mark not in self._chunks:
                break
            depth += 1
        # The deepest first, so that a chain is evicted from its end.
        for mark in reversed(turn.marks):
            if mark not in self._chunks:
                self._changed[mark] = True
            self._chunks[mark] = None
            self._chunks.move_to_end(mark)
        while len(self._chunks) > CACHE_CHUNKS:
            mark, _ = self._chunks.popitem(last=False)
            self._changed[mark] = False
        return min(depth * CHUNK_TOKENS, turn.num_tokens - 1)

    def _adapter_ready_s(self, adapter: int | None, now_s: float) -> float:
        if adapter is None:
            return now_s
        ready_s = self._device.pop(adapter, None)
        if ready_s is None:
            ready_s = now_s + ADAPTER_COPY_S
            if adapter not in self._host:
                self.num_loads += 1
                ready_s = max(now_s, heapq.heappop(self._loader_free_s)) + ADAPTER_LOAD_S
                heapq.heappush(self._loader_free_s, ready_s)
        self._device[adapter] = ready_s
        self._host[adapter] = None
        self._host.move_to_end(adapter)
        self._moved[adapter] = None
        if len(self._device) > DEVICE_ADAPTERS:
            self._moved[self._device.popitem(last=False)[0]] = None
        if len(self._host) > HOST_ADAPTERS:
            self._moved[self._host.popitem(last=False)[0]] = None
        return ready_s


@dataclass(frozen=True, slots=True)
class Served:
    """Outcome of a request: seconds to its first token, time of its end, and cached prompt tokens."""

    first_token_s: float
    end_s: float
    num_cached: int


@dataclass(slots=True)
class Tally:
    """Counts of a run after its warm-up."""

    first_token_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_loads: int = 0

    def count(self, turn: Turn, served: Served) -> None:
        """Count one request."""
        self.first_token_s.append(served.first_token_s)
        self.num_prompt_tokens += turn.num_tokens
        self.num_cached_tokens += served.num_cached


def _output(rng: random.Random) -> int:
    return rng.randint(50, 250)
