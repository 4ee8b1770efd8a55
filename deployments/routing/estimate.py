"""Estimate a request's time to the first token on a replica, from its last report and the requests sent since.

    expected = max(time for the prompts before it, for a row and, in parallel, for its adapter)
               + time for the uncached part of its own prompt + the current step + the replica's delay

Pure. Times are monotonic seconds of the gateway; the replica's clock is not used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from deployments.routing.asked import Asked
from deployments.routing.report import LoadReport

REPORT_PERIOD_S = 0.1
"""Report interval of a replica whose state changes; an idle one reports every `KEEPALIVE_S`."""
KEEPALIVE_S = 1.0
OVERDUE_S = 3.0
"""A replica silent for longer is expected to be as late with its tokens."""
DEFAULT_TOKENS_PER_S = 1000.0
DEFAULT_ADAPTER_LOAD_S = 0.5
COMING_SHARE = 0.3
"""Average share of an adapter's load time that remains if it is being read or is in host memory."""
SPARE_SHARE = 0.1
"""Last share of a replica's rows: taking one of these makes later requests wait."""
UNSEEN_S = 10.0
"""A request that a replica has not seen for so long no longer counts as on its way."""
MAX_LANDMARKS = 8192
"""Bound per replica: as many landmarks as it reports for its cache, and as many for the lower tiers."""


@dataclass(slots=True)
class Sent:
    """A request that this gateway has sent and that has not ended."""

    num_new_tokens: int
    landmarks: Sequence[int]
    adapter: int | None
    at_s: float = 0.0


@dataclass(slots=True)
class ReplicaState:
    """One replica as a gateway knows it; without a report it counts as idle and empty.

    Attributes:
        source: the connection that its reports come over.
        unseen: requests that were sent and are not in its reported numbers yet.
        sent_landmarks: landmarks that it caches, or soon will, for open requests of this gateway.
        lost_until_s: it is avoided until then unless it reports; None for not at all.
    """

    replica_id: str
    report: LoadReport | None = None
    heard_at_s: float = 0.0
    source: object = None
    landmarks: dict[int, None] = field(default_factory=dict)
    device: set[int] = field(default_factory=set)
    coming: set[int] = field(default_factory=set)
    sent: dict[str, Sent] = field(default_factory=dict)
    unseen: dict[str, Sent] = field(default_factory=dict)
    sent_landmarks: Counter[int] = field(default_factory=Counter)
    lost_until_s: float | None = None

    def hear(self, report: LoadReport, now_s: float, source: object) -> None:
        """Apply a report. Changes without a preceding whole report over the same connection are ignored."""
        if report.is_whole:
            self.landmarks.clear()
            self.device.clear()
            self.coming.clear()
        elif source is not self.source:
            return
        self.report, self.heard_at_s, self.source, self.lost_until_s = report, now_s, source, None
        for mark in report.landmarks_dropped:
            self.landmarks.pop(mark, None)
        self.landmarks.update(dict.fromkeys(report.landmarks_added))
        while len(self.landmarks) > MAX_LANDMARKS:
            del self.landmarks[next(iter(self.landmarks))]
        self.device.difference_update(report.adapters_dropped, report.adapters_coming)
        self.coming.difference_update(report.adapters_dropped, report.adapters_on_device)
        self.device.update(report.adapters_on_device)
        self.coming.update(report.adapters_coming)
        for request_id in report.seen:
            self.unseen.pop(request_id, None)
        while self.unseen and now_s - next(iter(self.unseen.values())).at_s > UNSEEN_S:
            del self.unseen[next(iter(self.unseen))]

    def forget(self) -> None:
        """Void everything that the replica has reported."""
        self.report, self.source = None, None
        self.landmarks.clear()
        self.device.clear()
        self.coming.clear()

    def send(self, request_id: str, sent: Sent) -> None:
        """Record a request sent to this replica."""
        self.sent[request_id] = self.unseen[request_id] = sent
        self.sent_landmarks.update(sent.landmarks)

    def end(self, request_id: str) -> None:
        """Record a request's end."""
        sent = self.sent.pop(request_id, None)
        self.unseen.pop(request_id, None)
        for mark in () if sent is None else sent.landmarks:
            self.sent_landmarks[mark] -= 1
            if self.sent_landmarks[mark] <= 0:
                del self.sent_landmarks[mark]


class Estimate(NamedTuple):
    """The expected effect of sending a request to a replica.

    Attributes:
        num_new_tokens: tokens of its prompt that must be computed.
        work_s: time to compute them.
        crowding_s: additional time that later requests wait for a row.
        occupancy: rows taken or waited for per row; above 1 if requests wait.
        has_adapter: the adapter is on the device, in host memory or being read, or none is needed.
    """

    first_token_s: float
    num_new_tokens: int
    work_s: float
    crowding_s: float
    occupancy: float
    has_adapter: bool


def estimate(asked: Asked, state: ReplicaState, now_s: float, defaults: LoadReport) -> Estimate:
    """Return the estimate for one replica.

    Args:
        defaults: used for what the replica has not measured yet; a report without load.
    """
    report = state.report or defaults
    rate = report.prefill_tokens_per_s or defaults.prefill_tokens_per_s or DEFAULT_TOKENS_PER_S
    age_s = now_s - state.heard_at_s if state.report else 0.0
    unseen = state.unseen.values()
    # The replica has worked on since its report, but changes older than one report period would have been reported.
    queued = max(0.0, report.queued_tokens - rate * min(age_s, REPORT_PERIOD_S))
    for sent in unseen:
        queued += sent.num_new_tokens
    wait_s = queued / rate
    taken = len(unseen) + report.num_running + report.num_waiting
    turnover_s = report.turnover_s or defaults.turnover_s
    too_many = taken + 1 - report.max_running
    wait_s = max(wait_s, too_many * turnover_s)
    crowding_s = max(0.0, too_many + SPARE_SHARE * report.max_running) * turnover_s
    has_adapter, load_s = _adapter(asked, state, unseen, report, defaults)
    num_new = max(1, asked.num_tokens - _num_cached(asked, state, report))
    first_token_s = max(wait_s, load_s) + num_new / rate
    # The duration of an idle replica's last step means nothing: it may have been a long prefill.
    first_token_s += report.step_s if report.num_running else 0.0
    first_token_s += report.stalled_s + (age_s if age_s > OVERDUE_S else 0.0)
    return Estimate(first_token_s, num_new, num_new / rate, crowding_s, taken / report.max_running, has_adapter)


def _adapter(
    asked: Asked, state: ReplicaState, unseen: Iterable[Sent], report: LoadReport, defaults: LoadReport
) -> tuple[bool, float]:
    if asked.adapter is None or asked.adapter in state.device:
        return True, 0.0
    load_s = report.adapter_load_s or defaults.adapter_load_s or DEFAULT_ADAPTER_LOAD_S
    is_coming = asked.adapter in state.coming or any(sent.adapter == asked.adapter for sent in unseen)
    return is_coming, load_s * (COMING_SHARE if is_coming else 1.0)


def _num_cached(asked: Asked, state: ReplicaState, report: LoadReport) -> int:
    """Return how many leading tokens are in the replica's prefix cache, or soon will be."""
    marks, stride = asked.block_marks, report.landmark_blocks
    if not stride:
        return 0
    at = stride - 1
    while at < len(marks) and (marks[at] in state.landmarks or marks[at] in state.sent_landmarks):
        at += stride
    return (at + 1 - stride) * report.block_tokens
