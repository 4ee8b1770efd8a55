"""The events of an answer, passed from the gateway to the routes: `Started`, pieces of text, `Finished`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class TokenScore(NamedTuple):
    """The log-probability of a token, with the token as text.

    Attributes:
        text: its spelling; incomplete characters become U+FFFD.
        raw: its bytes, empty if the text does not show it; concatenated over tokens they are the bytes of the text.
        logprob: natural logarithm; None for the first token of a prompt, which nothing precedes.
        top: the likeliest tokens at its position, likeliest first.
        rank: rank of the token at its position, 1 for the likeliest.
    """

    token_id: int
    text: str
    raw: bytes
    logprob: float | None
    top: tuple[TokenScore, ...] = ()
    rank: int = 1


class EndReason(StrEnum):
    """OpenAI's `finish_reason` values that a generation can end with."""

    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"
    CONTENT_FILTER = "content_filter"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The first event: the request is admitted and its first token is there. Errors before it have an HTTP status.

    Attributes:
        fingerprint: identifies weights, adapter and engine configuration; equal ones sample equal answers.
        prompt_text: the prompt, if it is to be echoed.
        prompt_scores: scores of the prompt's tokens, if requested.
        prompt_ids: its token ids, if requested.
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    fingerprint: str = ""
    prompt_text: str | None = None
    prompt_scores: tuple[TokenScore, ...] = ()
    prompt_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallDelta:
    """A piece of a tool call. The first of each call has its id and name; the concatenated arguments are JSON text.

    Attributes:
        index: index of the call in the answer.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """A piece of the answer; concatenated pieces are the answer, and no character is split.

    Attributes:
        text: of the content.
        reasoning: of the reasoning before it.
        calls: of the tool calls after it.
        scores: of the tokens that end in this piece, if requested; all pieces together have those of the answer.
        text_scores: those of `scores` whose tokens have characters of a `text`: of this piece, or the one before.
        shown_scores: those of `scores` whose tokens are of content or calls: not of reasoning, nor of the marks and
            white space around it.
        token_ids: the ids of the tokens of `scores`, and at last that of the token that ended the answer.
        shown_ids: those of `token_ids` whose tokens are of content or calls.
        num_tokens: tokens of the answer so far.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    scores: tuple[TokenScore, ...] = ()
    text_scores: tuple[TokenScore, ...] = ()
    shown_scores: tuple[TokenScore, ...] = ()
    token_ids: tuple[int, ...] = ()
    shown_ids: tuple[int, ...] = ()
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The safety classifier's verdict on one text: probability by hazard, and the hazards over their threshold.

    Attributes:
        error: why the text passes unjudged; None if it was judged.
    """

    score_by_hazard: dict[str, float]
    flagged: tuple[str, ...]
    error: str | None = None


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


class Moderated(NamedTuple):
    """The safety verdicts on an answer's input and output; None for a part without text or not reported on."""

    input: Verdict | None
    output: Verdict | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The last event.

    Attributes:
        num_reasoning_tokens: those of `num_completion_tokens` that are reasoning.
        num_accepted, num_rejected: tokens of the prediction that were accepted as draft tokens, and rejected.
        stop, stop_id: the stop string, or the request's stop token, that ended the text, if one did.
        refusal: the sentence to show if `reason` is CONTENT_FILTER and the input was refused.
        moderation: the safety verdicts, if requested.
    """

    reason: EndReason
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_reasoning_tokens: int = 0
    num_accepted: int = 0
    num_rejected: int = 0
    stop: str | None = None
    stop_id: int | None = None
    refusal: str | None = None
    moderation: Moderated | None = None


GenerationEvent = Started | TextDelta | Finished
