"""A replica's end of routing: reports its load to the gateways that watch it, as often as it changes.

Gateways watch only models with several replicas; without watchers nothing here runs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple

from adapters.identity import AdapterDigest
from deployments.generation_calls import TokenAddress
from deployments.routing.estimate import KEEPALIVE_S, REPORT_PERIOD_S
from deployments.routing.report import MAX_SEEN, LoadReport, adapter_mark, encode_report
from engine.metrics import EngineLoad
from engine.request import RequestId

if TYPE_CHECKING:
    from engine.adapter_pool import AdapterPool

_logger = logging.getLogger(__name__)

_AS_MEASURED = {field.name for field in fields(LoadReport)} & {field.name for field in fields(EngineLoad)}
"""Fields copied unchanged from the engine's load."""


class ReplicaName(NamedTuple):
    """The model that a replica serves, and the replica's id."""

    model: str
    replica_id: str


@dataclass(slots=True)
class _Watcher:
    """A gateway that gets reports; `seen` holds its requests accepted since the last one."""

    is_new: bool = True
    seen: list[RequestId] = field(default_factory=list)


@dataclass(slots=True)
class _Told:
    """The last reported state, known to every watcher that is not new."""

    landmarks: frozenset[int] = frozenset()
    places: Mapping[AdapterDigest, str] = field(default_factory=dict)
    numbers: tuple[object, ...] = ()
    at_s: float = 0.0


class Reporter:
    """Sends the reports of one replica to all its watchers. Bound to one event loop.

    Args:
        load, stock: the engine's load and adapters.
        send: sends a report; does nothing if the gateway is gone.
    """

    def __init__(
        self,
        name: ReplicaName,
        load: Callable[[], EngineLoad],
        stock: AdapterPool,
        send: Callable[[TokenAddress, bytes], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name = name
        self._load = load
        self._stock = stock
        self._send = send
        self._clock = clock
        self._watchers: dict[TokenAddress, _Watcher] = {}
        self._told = _Told()
        self._turnover = Turnover()
        self._task: asyncio.Task[None] | None = None

    def watch(self, address: TokenAddress) -> None:
        """Report to a gateway from now on, starting with a whole report."""
        watcher = self._watchers.setdefault(address, _Watcher())
        watcher.is_new = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def forget(self, address: TokenAddress) -> None:
        """Stop reporting to a gateway."""
        self._watchers.pop(address, None)

    def note(self, address: TokenAddress, request_id: RequestId) -> None:
        """Record that the engine has a gateway's request."""
        watcher = self._watchers.get(address)
        if watcher is not None and len(watcher.seen) < MAX_SEEN:
            watcher.seen.append(request_id)

    def close(self) -> None:
        """Stop all reports."""
        if self._task is not None:
            self._task.cancel()

    def report(self) -> None:
        """Send each watcher what is new to it; without news, only once `KEEPALIVE_S` seconds have passed."""
        now_s = self._clock()
        load, told = self._load(), self._told
        places = self._stock.places()
        moved = {} if places == told.places else _moves(told.places, places)
        turnover_s = self._turnover.observe(load, now_s)
        numbers = (load.queued_tokens, load.num_running, load.num_waiting, len(self._watchers))
        has_news = (load.landmarks, numbers) != (told.landmarks, told.numbers)
        is_due = has_news or bool(moved) or now_s - told.at_s >= KEEPALIVE_S
        for address, watcher in list(self._watchers.items()):
            if not is_due and not watcher.is_new and not watcher.seen:
                continue
            known = frozenset[int]() if watcher.is_new else told.landmarks
            report = LoadReport(
                model=self._name.model,
                replica_id=self._name.replica_id,
                **{name: getattr(load, name) for name in _AS_MEASURED},
                num_gateways=len(self._watchers),
                turnover_s=turnover_s,
                adapter_load_s=self._stock.loads.average_s,
                is_whole=watcher.is_new,
                landmarks_added=tuple(load.landmarks - known),
                landmarks_dropped=tuple(known - load.landmarks),
                **(_moves({}, places) if watcher.is_new else moved),
                seen=tuple(watcher.seen),
            )
            watcher.is_new, watcher.seen = False, []
            self._send(address, encode_report(report))
        if is_due:
            told.at_s = now_s
        told.landmarks, told.places, told.numbers = load.landmarks, places, numbers

    async def _run(self) -> None:
        while self._watchers:
            try:
                self.report()
            except Exception:
                # Top of the task: keep it running, since gateways choose a replica less and less while it is silent.
                _logger.exception("the load could not be reported")
                # It may have failed for one watcher behind another: neither has been told the same.
                for watcher in self._watchers.values():
                    watcher.is_new = True
                await asyncio.sleep(KEEPALIVE_S)
            await asyncio.sleep(REPORT_PERIOD_S)


def _moves(known: Mapping[AdapterDigest, str], places: Mapping[AdapterDigest, str]) -> dict[str, Any]:
    """Return a report's fields for the adapters that are not where a gateway knows them to be."""
    moved = [(adapter_mark(digest), place) for digest, place in places.items() if known.get(digest) != place]
    return {
        "adapters_on_device": tuple(mark for mark, place in moved if place == "device"),
        "adapters_coming": tuple(mark for mark, place in moved if place != "device"),
        "adapters_dropped": tuple(map(adapter_mark, known.keys() - places.keys())),
    }


class Turnover:
    """Estimates the time between requests' ends while others wait for a row: a new request's wait per one ahead."""

    def __init__(self) -> None:
        self._turnover_s = 0.0
        self._since: tuple[int, float] | None = None

    def observe(self, load: EngineLoad, now_s: float) -> float:
        """Update with the engine's current load and return the seconds between two ends; 0 if unknown."""
        if not load.num_waiting or load.num_running < load.max_running:
            self._since = None
        elif self._since is None:
            self._since = (load.num_ended, now_s)
        elif load.num_ended > self._since[0]:
            took_s = (now_s - self._since[1]) / (load.num_ended - self._since[0])
            self._turnover_s = (self._turnover_s + took_s) / 2 if self._turnover_s else took_s
            self._since = (load.num_ended, now_s)
        return self._turnover_s
