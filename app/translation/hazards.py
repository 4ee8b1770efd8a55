"""Map MLCommons' hazards to OpenAI's thirteen moderation categories.

Source: AILuminate 1.0 and Llama Guard 3's card (S1 to S14) for the hazards, OpenAI's moderation reference for the
categories. A hazard without a counterpart (elections, privacy, ...) appears under its own name only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

OPENAI_CATEGORIES = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/intent",
    "self-harm/instructions",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)

CATEGORIES_BY_HAZARD: dict[str, tuple[str, ...]] = {
    "violent_crimes": ("violence", "illicit/violent"),
    "nonviolent_crimes": ("illicit",),
    "sex_related_crimes": ("sexual", "illicit"),
    "child_sexual_exploitation": ("sexual", "sexual/minors"),
    "indiscriminate_weapons": ("violence", "illicit/violent"),
    "hate": ("hate",),
    "suicide_and_self_harm": ("self-harm",),
    "sexual_content": ("sexual",),
}

_SYNONYMS = {
    "s1": "violent_crimes",
    "s2": "nonviolent_crimes",
    "s3": "sex_related_crimes",
    "s4": "child_sexual_exploitation",
    "s9": "indiscriminate_weapons",
    "s10": "hate",
    "s11": "suicide_and_self_harm",
    "s12": "sexual_content",
    "non_violent_crimes": "nonviolent_crimes",
    "sex_crimes": "sex_related_crimes",
    "child_exploitation": "child_sexual_exploitation",
    "indiscriminate_weapons_cbrne": "indiscriminate_weapons",
    "hate_speech": "hate",
    "self_harm": "suicide_and_self_harm",
    "suicide_self_harm": "suicide_and_self_harm",
}


def openai_scores(score_by_hazard: Mapping[str, float]) -> dict[str, float]:
    """Return the highest score for each of OpenAI's categories, then the classifier's own hazards unchanged."""
    scores = dict.fromkeys(OPENAI_CATEGORIES, 0.0)
    for hazard, score in score_by_hazard.items():
        for category in categories_of(hazard):
            scores[category] = max(scores[category], score)
    return scores | {hazard: score for hazard, score in score_by_hazard.items() if hazard not in scores}


def categories_of(hazard: str) -> tuple[str, ...]:
    """Return OpenAI's categories for a classifier's label in any known spelling; empty if there are none."""
    if hazard in OPENAI_CATEGORIES:
        return (hazard,)
    name = re.sub(r"[^a-z0-9]+", "_", hazard.lower()).strip("_")
    return CATEGORIES_BY_HAZARD.get(_SYNONYMS.get(name, name), ())
