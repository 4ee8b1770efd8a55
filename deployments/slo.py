"""Service level objectives, and which answers missed them. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.timeline import CANCELLED, GOOD_OUTCOMES, Timeline

REFUSALS = ("OverloadError", "UnavailableError")
NOT_COUNTED = (CANCELLED, "RequestError", "SlowReaderError")
"""Outcomes that say nothing about the service: the client left or did not read, or sent an invalid request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Service level objectives of one answer, in seconds; None for no bound.

    Attributes:
        ttft_s: from arrival to the first text that is shown.
        tpot_s: mean time between tokens after the first.
        e2e_s: from arrival to the end.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def missed(self, timeline: Timeline) -> tuple[str, ...] | None:
        """Return what a finished answer missed: bounds, "refused" or "failed"; None if it does not count."""
        if timeline.outcome in NOT_COUNTED:
            return None
        if timeline.outcome not in GOOD_OUTCOMES:
            return ("refused",) if timeline.outcome in REFUSALS else ("failed",)
        measured = {"ttft": timeline.first_text_s, "tpot": timeline.tpot_s, "e2e": timeline.end_s}
        bounds = {"ttft": self.ttft_s, "tpot": self.tpot_s, "e2e": self.e2e_s}
        return tuple(
            name
            for name, bound_s in bounds.items()
            if bound_s is not None and (took_s := measured[name]) is not None and took_s > bound_s
        )
