"""Answers of the gateway -> the wire's values. Pure; the bytes of streams are `app.sse`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.hazards import openai_scores
from app.schemas.chat import AssistantMessage, ChatChoice, ChatCompletion
from app.schemas.common import PromptTokensDetails, Usage
from app.schemas.completions import Completion, CompletionChoice
from app.schemas.models import Model
from app.schemas.moderations import ModerationResponse, ModerationResult
from app.streaming import Answer
from deployments.generation import Finished, ModelCard, Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """What every chunk and answer of one request repeats; `created_s` is Unix time in seconds."""

    response_id: str
    created_s: int
    model: str


def usage(finished: Iterable[Finished]) -> Usage:
    """Return the token counts of all choices together."""
    ends = tuple(finished)
    num_prompt_tokens = sum(end.num_prompt_tokens for end in ends)
    num_completion_tokens = sum(end.num_completion_tokens for end in ends)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(end.num_cached_tokens for end in ends)),
    )


def chat_completion(head: ResponseHead, answer: Answer) -> ChatCompletion:
    """Return a whole chat answer; a refused input has a `refusal` and no content."""
    refusal = answer.finished.refusal
    message = AssistantMessage(content=answer.text if refusal is None else None, refusal=refusal)
    choice = ChatChoice(index=0, message=message, finish_reason=answer.finished.reason.value)
    return ChatCompletion(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        choices=[choice],
        usage=usage([answer.finished]),
    )


def completion(head: ResponseHead, answers: Sequence[Answer]) -> Completion:
    """Return whole text answers, one choice for each prompt."""
    choices = [
        CompletionChoice(index=index, text=answer.text, finish_reason=answer.finished.reason.value)
        for index, answer in enumerate(answers)
    ]
    return Completion(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        choices=choices,
        usage=usage(answer.finished for answer in answers),
    )


def model(card: ModelCard) -> Model:
    """Return one entry of the list of models."""
    return Model(id=card.name, created=card.created_s, parent=card.parent, max_model_len=card.max_model_len)


def moderation(response_id: str, classifier: str, verdicts: Iterable[Verdict]) -> ModerationResponse:
    """Return the classifier's verdicts under OpenAI's categories and its own hazards."""
    return ModerationResponse(id=response_id, model=classifier, results=[_result(verdict) for verdict in verdicts])


def _result(verdict: Verdict) -> ModerationResult:
    scores = openai_scores(verdict.score_by_hazard)
    flags = openai_scores(dict.fromkeys(verdict.flagged, 1.0))
    return ModerationResult(
        flagged=bool(verdict.flagged),
        categories={category: flags.get(category, 0.0) > 0 for category in scores},
        category_scores=scores,
        category_applied_input_types={category: ["text"] for category in scores},
    )
