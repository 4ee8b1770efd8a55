from __future__ import annotations

import pytest

from app.translation.moderation import CATEGORIES_BY_HAZARD, OPENAI_CATEGORIES, categories_of, openai_scores


@pytest.mark.parametrize(
    ("label", "categories"),
    [
        ("hate", ("hate",)),
        ("Hate Speech", ("hate",)),
        ("S10", ("hate",)),
        ("Suicide & Self-Harm", ("self-harm",)),
        ("non-violent crimes", ("illicit",)),
        ("elections", ()),
        ("sexual/minors", ("sexual/minors",)),
    ],
)
def test_labels_are_found_however_they_are_spelt(label: str, categories: tuple[str, ...]) -> None:
    assert categories_of(label) == categories


def test_a_category_has_the_score_of_its_likeliest_hazard() -> None:
    scores = openai_scores({"violent_crimes": 0.2, "indiscriminate_weapons": 0.7, "elections": 0.4})
    assert scores["violence"] == 0.7
    assert scores["hate"] == 0.0
    assert scores["elections"] == 0.4


def test_every_hazard_maps_to_categories_that_exist() -> None:
    assert {category for names in CATEGORIES_BY_HAZARD.values() for category in names} <= set(OPENAI_CATEGORIES)
