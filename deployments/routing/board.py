"""What a gateway knows about the replicas of one model, and the choice among them.

A replica's cost is the expected time to the first token (`deployments.routing.estimate`) plus the delay for later
requests: a share of the prefill work, which is wasted if a prefix is recomputed, and their wait if one of the last rows
is taken. Costs that differ by less than the estimate's accuracy count as equal. Among equals, rendezvous hashing of the
prompt decides, so that gateways with equal knowledge choose alike, unless one of them has fewer rows taken: a short
prefix that all chats share must not draw a burst of them to one replica, where each token would take longer.

    an adapter's homes: the first n replicas by its own rendezvous hash, n by how busy it keeps replicas

If an adapter is not loaded on a replica that is not one of its homes, its load time counts double: loading it there
displaces other adapters. So cold adapters stay where they are, and hot ones spread to more replicas.

Pure. Thread-safe: Serve may run its router on a thread of its own. Memory is bounded by the number of replicas, of
open requests, and of adapters (`MAX_ADAPTERS`).
**Source:** rendezvous hashing: Thaler and Ravishankar, IEEE/ACM Transactions on Networking 6(1), 1998.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cache, lru_cache
from heapq import nlargest
from statistics import fmean

from deployments.routing.asked import Asked, hash64
from deployments.routing.estimate import DEFAULT_ADAPTER_LOAD_S, REPORT_PERIOD_S, Estimate, ReplicaState, Sent, estimate
from deployments.routing.report import LoadReport
from engine.request import RequestId

EQUAL_S = 0.003
EQUAL_SHARE = 0.1
"""Costs above the least by no more than the larger of `EQUAL_S` and this share of the least count as equal."""
MAX_UNEVENNESS = 0.02
"""Among equals, a replica is not chosen if its occupancy exceeds the lowest by more than this: a row of 64."""
WORK_SHARE = 0.5
"""Share of a prompt's prefill time that counts as its cost to later requests."""
FOREIGN_LOAD = 2.0
"""Factor on the load time of an adapter on a replica that is not one of its homes."""
MAX_OPEN = 1 << 16
"""Bound on tracked requests; beyond it the oldest is dropped, as its end was never reported."""
LOST_S = 60.0
"""How long a replica that lost a request is avoided unless it reports; Serve replaces a hung one sooner."""
MEMORY_S = 30.0
"""Time constant of the exponential decay of an adapter's work."""
FULL_SHARE = 0.5
"""An adapter that keeps a replica busy for this share of the time gets one more."""
MAX_ADAPTERS = 4096
_MASK = (1 << 64) - 1
_hash_of = lru_cache(maxsize=4096)(hash64)


class Board:
    """The replicas of one model as this process knows them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state_by_id: dict[str, ReplicaState] = {}
        self._replica_by_request: dict[str, str] = {}
        self._demand = AdapterDemand()
        self._is_listed = self._is_several = False
        self._averaged: tuple[float, LoadReport] | None = None

    @property
    def block_tokens(self) -> int:
        """Tokens per block, or 0 if no replica has reported a prefix cache."""
        with self._lock:
            reports = [state.report for state in self._state_by_id.values() if state.report]
        return max((report.block_tokens for report in reports if report.landmark_blocks), default=0)

    def set_replicas(self, replica_ids: Sequence[str]) -> None:
        """Adopt Serve's list of replicas and forget all others."""
        with self._lock:
            known = self._state_by_id
            self._is_listed, self._is_several = True, len(replica_ids) > 1
            self._state_by_id = {i: known.get(i) or ReplicaState(i) for i in replica_ids}
            self._replica_by_request = {r: i for r, i in self._replica_by_request.items() if i in self._state_by_id}

    def is_deserted(self) -> bool:
        """Whether Serve's list has no replica; not before there is a list."""
        with self._lock:
            return self._is_listed and not self._state_by_id

    def unheard(self) -> frozenset[str]:
        """Return the replicas that have not reported and should be asked to: none unless there are several."""
        with self._lock:
            states = self._state_by_id.values() if self._is_several else ()
            return frozenset(state.replica_id for state in states if state.report is None)

    def hear(self, report: LoadReport, now_s: float, source: object = None) -> None:
        """Apply a report that came over the connection `source`; ignored if the replica is not on Serve's list."""
        with self._lock:
            state = self._state_by_id.get(report.replica_id)
            if state is not None:
                state.hear(report, now_s, source)

    def lose_source(self, source: object, now_s: float) -> list[RequestId]:
        """Handle the end of a connection: void its reports, avoid its replica, and return the requests sent there."""
        sent: list[RequestId] = []
        with self._lock:
            for state in self._state_by_id.values():
                if state.source is source:
                    state.forget()
                    state.lost_until_s = now_s + LOST_S
                    sent += map(RequestId, state.sent)
        return sent

    def lose(self, replica_id: str) -> None:
        """Forget a replica that Serve has found dead."""
        with self._lock:
            self._state_by_id.pop(replica_id, None)
            self._replica_by_request = {r: i for r, i in self._replica_by_request.items() if i != replica_id}

    def lose_request(self, request_id: str, now_s: float) -> None:
        """Record that a replica lost a request: avoid it for `LOST_S` seconds, or until it reports again."""
        with self._lock:
            state = self._state_by_id.get(self._replica_by_request.get(request_id, ""))
            if state is not None:
                state.lost_until_s = now_s + LOST_S
        self.end(request_id)

    def choose(self, asked: Asked, candidates: Sequence[str], now_s: float) -> list[str]:
        """Return the candidates, best first, without lost ones; the first counts as chosen until `end`."""
        with self._lock:
            # While all replicas are full, Serve asks again and again for each request that waits.
            is_new = asked.request_id not in self._replica_by_request
            self._unsend(asked.request_id)
            states = [self._state_of(replica_id) for replica_id in candidates]
            alive = [s for s in states if s.lost_until_s is None or s.lost_until_s <= now_s]
            if not alive:
                return []
            defaults = self._averages(now_s)
            found = {state.replica_id: estimate(asked, state, now_s, defaults) for state in alive}
            cost_by_id = self._costs(asked, found, defaults, now_s)
            best = _best(asked, found, cost_by_id)
            self._send(asked, self._state_by_id[best], found[best], defaults, now_s, is_new=is_new)
            others = sorted((cost, i) for i, cost in cost_by_id.items() if i != best)
            return [best, *(i for _, i in others)]

    def move(self, request_id: str, replica_id: str) -> None:
        """Record that Serve sent a request to another replica than was chosen, which had no room."""
        with self._lock:
            chosen = self._replica_by_request.get(request_id)
            if chosen is None or chosen == replica_id or replica_id not in self._state_by_id:
                return
            sent = self._state_by_id[chosen].sent[request_id]
            self._unsend(request_id)
            self._state_by_id[replica_id].send(request_id, sent)
            self._replica_by_request[request_id] = replica_id

    def end(self, request_id: str) -> None:
        """Record that a request has ended, or never began. Idempotent."""
        with self._lock:
            self._unsend(request_id)

    def _state_of(self, replica_id: str) -> ReplicaState:
        state = self._state_by_id.get(replica_id)
        if state is None:
            state = self._state_by_id[replica_id] = ReplicaState(replica_id)
        return state

    def _averages(self, now_s: float) -> LoadReport:
        if self._averaged is None or now_s - self._averaged[0] >= REPORT_PERIOD_S:
            self._averaged = (now_s, _defaults(list(self._state_by_id.values())))
        return self._averaged[1]

    def _costs(self, asked: Asked, found: dict[str, Estimate], defaults: LoadReport, now_s: float) -> dict[str, float]:
        """Return each replica's cost: the expected time, plus the cost to others of work, a row and an adapter load."""
        cost_by_id = {i: e.first_token_s + WORK_SHARE * e.work_s + e.crowding_s for i, e in found.items()}
        if asked.adapter is None:
            return cost_by_id
        num_homes = self._demand.num_homes(asked.adapter, now_s, defaults.num_gateways)
        adapter = asked.adapter
        homes = set(nlargest(num_homes, found, key=lambda i: weight(adapter, i)))
        load_s = defaults.adapter_load_s or DEFAULT_ADAPTER_LOAD_S
        for i, found_there in found.items():
            if not found_there.has_adapter and i not in homes:
                cost_by_id[i] += (FOREIGN_LOAD - 1) * load_s
        return cost_by_id

    def _send(
        self,
        asked: Asked,
        state: ReplicaState,
        found: Estimate,
        defaults: LoadReport,
        now_s: float,
        *,
        is_new: bool,
    ) -> None:
        report = state.report or defaults
        state.send(
            asked.request_id,
            Sent(found.num_new_tokens, tuple(asked.landmarks(report.landmark_blocks)), asked.adapter, now_s),
        )
        self._replica_by_request[asked.request_id] = state.replica_id
        if len(self._replica_by_request) > MAX_OPEN:
            self._unsend(next(iter(self._replica_by_request)))
        if asked.adapter is not None and is_new:
            rate = report.prefill_tokens_per_s or defaults.prefill_tokens_per_s
            work_s = max(found.num_new_tokens / rate if rate else 0.0, report.turnover_s)
            self._demand.note(asked.adapter, work_s, now_s)

    def _unsend(self, request_id: str) -> None:
        state = self._state_by_id.get(self._replica_by_request.pop(request_id, ""))
        if state is not None:
            state.end(request_id)


class AdapterDemand:
    """How much work each adapter causes, so that a hot one gets several replicas and a cold one few.

    It is counted in replica-seconds per second; beyond `MAX_ADAPTERS` the least recently used is forgotten.
    """

    def __init__(self) -> None:
        self._by_adapter: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def note(self, adapter: int, work_s: float, now_s: float) -> None:
        """Count one request that keeps a replica busy for `work_s`."""
        self._by_adapter[adapter] = (self.share(adapter, now_s) + work_s / MEMORY_S, now_s)
        self._by_adapter.move_to_end(adapter)
        if len(self._by_adapter) > MAX_ADAPTERS:
            self._by_adapter.popitem(last=False)

    def share(self, adapter: int, now_s: float) -> float:
        """Return how many replicas the adapter keeps busy: 0.5 is one replica half of the time."""
        share, at_s = self._by_adapter.get(adapter, (0.0, now_s))
        return share * math.exp((at_s - now_s) / MEMORY_S)

    def num_homes(self, adapter: int, now_s: float, num_gateways: int) -> int:
        """Return how many home replicas the adapter gets, assuming that each gateway sees the same demand."""
        return 1 + int(self.share(adapter, now_s) * num_gateways / FULL_SHARE)


def _best(asked: Asked, found: dict[str, Estimate], cost_by_id: dict[str, float]) -> str:
    least = min(cost_by_id.values())
    equals = [i for i, cost in cost_by_id.items() if cost <= least + max(EQUAL_S, EQUAL_SHARE * least)]
    emptiest = min(found[i].occupancy for i in equals)
    fit = [i for i in equals if found[i].occupancy <= emptiest + MAX_UNEVENNESS]
    key = asked.key
    return max(fit, key=lambda i: (weight(key, i), i))


def _defaults(states: Sequence[ReplicaState]) -> LoadReport:
    """Return the averages of the replicas' measurements, as defaults for replicas without any."""
    reports = [state.report for state in states if state.report is not None]
    if not reports:
        return LoadReport(model="", replica_id="")

    def mean(values: Sequence[float]) -> float:
        measured = [value for value in values if value]
        return fmean(measured) if measured else 0.0

    return LoadReport(
        model="",
        replica_id="",
        max_running=max(report.max_running for report in reports),
        num_gateways=max(report.num_gateways for report in reports),
        block_tokens=reports[0].block_tokens,
        landmark_blocks=reports[0].landmark_blocks,
        prefill_tokens_per_s=mean([report.prefill_tokens_per_s for report in reports]),
        step_s=mean([report.step_s for report in reports]),
        turnover_s=mean([report.turnover_s for report in reports]),
        adapter_load_s=mean([report.adapter_load_s for report in reports]),
    )


def weight(key: int, replica_id: str) -> int:
    """Return the rendezvous weight of a replica for a 64-bit key, the same in every process."""
    mixed = (key ^ _hash_of(replica_id)) * 0x9E3779B97F4A7C15 & _MASK
    mixed = (mixed ^ mixed >> 32) * 0xD6E8FEB86659FD93 & _MASK
    return mixed ^ mixed >> 32


@cache
def board_of(model: str) -> Board:
    """Return this process's board of a model, shared by Serve's router and the gateway's token channel."""
    return Board()
