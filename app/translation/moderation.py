"""The safety classifier in the API: resolve its name, read a chat's moderation options, and return its verdicts.

MLCommons' hazards count for OpenAI's thirteen moderation categories. Source: AILuminate 1.0 and Llama Guard 3's card
(S1 to S14) for the hazards, OpenAI's moderation reference for the categories. A hazard without a counterpart
(elections, privacy, ...) appears under its own name only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from app.http.errors import ApiError, without_internals
from app.schemas.moderations import (
    ChatModeration,
    ChatModerationRequest,
    ModerationError,
    ModerationResult,
    ModerationResults,
    ScoredText,
)
from deployments.answer_events import Finished, Verdict
from deployments.errors import unknown_model
from deployments.generation import Moderation

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


OPENAI_MODELS = ("omni-moderation-", "text-moderation-")
"""Clients have these names built in; they select the server's classifier."""


def classifier_name(asked: str | None, known: str | None, *, field: str = "model") -> str:
    """Return the classifier that a request selects by a field; `known` is the server's.

    Raises:
        ApiError: 404: the server has no classifier.
        RequestError: no classifier has this name.
    """
    if known is None:
        raise ApiError(404, "This server has no safety classifier.", param="model", code="model_not_found")
    if asked is not None and asked != known and not asked.startswith(OPENAI_MODELS):
        raise unknown_model(asked, field=field)
    return known


def chat_classifier(asked: ChatModerationRequest | None, known: str | None) -> str | None:
    """Return the name of the classifier whose results a chat requests; None if it requests none.

    Raises:
        ApiError: 400: the server has no classifier.
        RequestError: no classifier has this name.
    """
    if asked is None:
        return None
    if known is None:
        message = "'moderation' cannot be used: this server has no safety classifier."
        raise ApiError(400, message, param="moderation", code="unsupported_parameter")
    return classifier_name(asked.model, known, field="moderation.model")


def moderation_asked(asked: ChatModerationRequest | None) -> Moderation | None:
    """Return a chat's moderation options; without a policy, results are returned but block nothing more."""
    if asked is None:
        return None
    policy = asked.policy
    return Moderation(
        blocks_input=policy is not None and policy.input is not None and policy.input.mode == "block",
        blocks_output=policy is not None and policy.output is not None and policy.output.mode == "block",
    )


def chat_moderation(finished: Sequence[Finished], classifier: str) -> ChatModeration:
    """Return the verdicts on a chat: one for its input, and one for each choice that has text."""
    told = [end.moderation for end in finished if end.moderation is not None]
    return ChatModeration(
        input=_results([one.input for one in told[:1]], classifier),
        output=_results([one.output for one in told], classifier),
    )


def _results(verdicts: Iterable[Verdict | None], classifier: str) -> ModerationResults | ModerationError:
    found = [verdict for verdict in verdicts if verdict is not None]
    for verdict in found:
        if verdict.error is not None:
            return ModerationError(message=without_internals(verdict.error))
    return ModerationResults(
        model=classifier,
        results=[ScoredText(model=classifier, **result(verdict).model_dump()) for verdict in found],
    )


def result(verdict: Verdict) -> ModerationResult:
    """Return a verdict by OpenAI's categories and by the classifier's own hazards."""
    scores = openai_scores(verdict.score_by_hazard)
    flags = openai_scores(dict.fromkeys(verdict.flagged, 1.0))
    return ModerationResult(
        flagged=bool(verdict.flagged),
        categories={category: flags.get(category, 0.0) > 0 for category in scores},
        category_scores=scores,
        category_applied_input_types={category: ["text"] for category in scores},
    )
