"""The verdict on several texts, or on pieces of one. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from deployments.answer_events import Verdict


def worst(verdicts: Sequence[Verdict]) -> Verdict | None:
    """Merge the verdicts on several texts: all flags, and the highest score of each hazard; None for no texts.

    If any text went unjudged and none is flagged, the merged verdict carries the error.
    """
    if not verdicts:
        return None
    scores: dict[str, float] = {}
    for verdict in verdicts:
        for hazard, score in verdict.score_by_hazard.items():
            scores[hazard] = max(scores.get(hazard, 0.0), score)
    flagged = tuple(dict.fromkeys(hazard for verdict in verdicts for hazard in verdict.flagged))
    error = next((verdict.error for verdict in verdicts if verdict.error is not None), None)
    return Verdict(score_by_hazard=scores, flagged=flagged, error=None if flagged else error)
