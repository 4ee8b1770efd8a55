"""The safety classifier in the API: resolve its name, read a chat's moderation options, and return its verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.http.errors import ApiError, without_internals
from app.schemas.moderations import (
    ChatModeration,
    ChatModerationRequest,
    ModerationError,
    ModerationResult,
    ModerationResults,
    ScoredText,
)
from app.translation.hazards import openai_scores
from deployments.errors import unknown_model
from deployments.generation import Finished, Moderation, Verdict

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
