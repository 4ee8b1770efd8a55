"""Finds requests that cannot be served any more, so that they cost no further step. Pure: standard library only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from engine.ports import AdapterGate
from engine.request import FinishReason
from engine.scheduling.admission import AdmissionControl
from engine.scheduling.live_request import LiveRequest

DEADLINE_PASSED = "The request's deadline passed before its answer was complete."
DEADLINE_LOST = "The request waited so long that its answer cannot be complete by its deadline."

RISK = 1.25
"""A deadline is at risk if the time left is less than this multiple of the time that the answer takes."""
MAX_LOOK_S = 0.25
"""Looking whether a request can still make it takes microseconds, too long for hundreds of them before each step."""


class Ending(NamedTuple):
    """A request to end, and why."""

    live: LiveRequest
    reason: FinishReason
    error: str


def hopeless(
    requests: Sequence[LiveRequest], gate: AdapterGate, admission: AdmissionControl, num_running: int, now_s: float
) -> Iterator[Ending]:
    """Yield requests that have missed or are bound to miss their deadline, or whose adapter cannot become resident.

    Those without a row that may miss their deadline get a head start, and with them those before them that have one:
    each was admitted with its place among the others.
    """
    error_by_adapter: dict[str, str | None] = {}
    for live in requests:
        deadline_s = live.request.deadline_s
        if deadline_s is not None and deadline_s <= now_s:
            yield Ending(live, FinishReason.EXPIRED, DEADLINE_PASSED)
            continue
        if live.row is not None:
            continue
        adapter = live.request.adapter
        if deadline_s is not None and _is_lost(live, requests, admission, num_running, now_s):
            yield Ending(live, FinishReason.EXPIRED, DEADLINE_LOST)
        elif adapter is not None:
            if adapter not in error_by_adapter:
                error_by_adapter[adapter] = gate.error(adapter)
            error = error_by_adapter[adapter]
            if error is not None:
                reason = FinishReason.UNAVAILABLE if gate.passes(adapter) else FinishReason.FAILED
                yield Ending(live, reason, error)


def _is_lost(
    live: LiveRequest, requests: Sequence[LiveRequest], admission: AdmissionControl, num_running: int, now_s: float
) -> bool:
    """Whether a waiting request would miss its deadline even with the engine to itself; if not, hurry it if need be."""
    if live.next_look_s > now_s:
        return False
    left_s = admission.spare_s(live, now_s, num_rows=1, margin=1.0)
    if left_s < 0 and not live.output_ids:
        return True
    if not live.is_hurried:
        beside_s = admission.spare_s(live, now_s, num_rows=num_running + 1, margin=RISK)
        if beside_s < 0:
            _hurry(live, requests)
        else:
            left_s = beside_s
    live.next_look_s = now_s + (min(MAX_LOOK_S, left_s / 4) if left_s > 0 else MAX_LOOK_S)
    return False


def _hurry(live: LiveRequest, requests: Sequence[LiveRequest]) -> None:
    rank = live.rank
    for other in requests:
        waits = other.row is None and other.request.deadline_s is not None and not other.is_hurried
        if waits and other.rank <= rank:
            other.hurry()
