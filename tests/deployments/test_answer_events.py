from __future__ import annotations

from deployments.answer_events import Verdict, worst


def verdict(score: float, *flagged: str, error: str | None = None) -> Verdict:
    return Verdict(score_by_hazard={"hate": score, "privacy": 1 - score}, flagged=flagged, error=error)


def test_several_texts_are_as_bad_as_their_worst() -> None:
    assert worst([]) is None
    assert worst([verdict(0.25), verdict(0.5, "hate")]) == Verdict(
        score_by_hazard={"hate": 0.5, "privacy": 0.75}, flagged=("hate",)
    )
    found = worst([verdict(0.25), verdict(0.0, error="gone")])
    assert found is not None
    assert found.error == "gone"
    flagged = worst([verdict(0.25, "hate"), verdict(0.0, error="gone")])
    assert flagged is not None
    assert flagged.error is None
