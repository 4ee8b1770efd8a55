"""Finds requests that cannot be served any more, so that they cost no further step. Pure: standard library only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from engine.ports import AdapterGate
from engine.request import FinishReason
from engine.scheduling.live_request import LiveRequest

DEADLINE_PASSED = "The request's deadline passed before its answer was complete."
DEADLINE_LOST = "The request waited so long that its answer cannot be complete by its deadline."


class Ending(NamedTuple):
    """A request to end, and why."""

    live: LiveRequest
    reason: FinishReason
    error: str


def hopeless(
    requests: Iterable[LiveRequest],
    gate: AdapterGate,
    is_too_late: Callable[[LiveRequest, float], bool],
    now_s: float,
) -> Iterator[Ending]:
    """Yield requests that have missed or are bound to miss their deadline, or whose adapter cannot become resident.

    Args:
        is_too_late: whether a request without a row would miss its deadline even with the engine to itself.
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
        if deadline_s is not None and is_too_late(live, now_s):
            yield Ending(live, FinishReason.EXPIRED, DEADLINE_LOST)
        elif adapter is not None:
            if adapter not in error_by_adapter:
                error_by_adapter[adapter] = gate.error(adapter)
            error = error_by_adapter[adapter]
            if error is not None:
                reason = FinishReason.UNAVAILABLE if gate.passes(adapter) else FinishReason.FAILED
                yield Ending(live, reason, error)


def hurry(waiting: Iterable[LiveRequest], is_at_risk: Callable[[LiveRequest], bool]) -> None:
    """Give a head start, once, to waiting requests that may miss their deadline."""
    # Filtered first: every step looks at all waiting requests, and most have no deadline.
    for live in [live for live in waiting if live.request.deadline_s is not None and not live.is_hurried]:
        if is_at_risk(live):
            live.hurry()
