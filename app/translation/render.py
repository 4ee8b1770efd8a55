"""Translate answers of the gateway to response values. Pure functions; `app.translation.chunks` writes streams."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import cast

from app.schemas.chat import AssistantMessage, ChatChoice, ChatCompletion, ChatCompletionRequest
from app.schemas.common import (
    ChatLogprobs,
    ChosenLogprob,
    CompletionTokensDetails,
    PromptLogprob,
    PromptLogprobs,
    PromptTokensDetails,
    SamplingFields,
    TokenLogprob,
    Usage,
    WireFinishReason,
)
from app.schemas.completions import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from app.schemas.tools import FunctionCall, MessageToolCall
from app.translation.moderation import chat_moderation
from app.translation.streaming import Answer
from deployments.answer_events import Finished, Started, TokenScore
from deployments.generation import ToolCall

LEAST_LOGPROB = -9999.0
REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseHead:
    """Fields common to all chunks and answers of one request; `created_s` is Unix time in seconds."""

    response_id: str
    created_s: int
    model: str


def usage(finished: Sequence[Finished], answers_per_prompt: int) -> Usage:
    """Return the total token counts of all choices, given in order; a prompt counts once for all its answers."""
    ends = finished[::answers_per_prompt]
    num_prompt_tokens = sum(end.num_prompt_tokens for end in ends)
    num_completion_tokens = sum(end.num_completion_tokens for end in finished)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(end.num_cached_tokens for end in ends)),
        completion_tokens_details=CompletionTokensDetails(
            reasoning_tokens=sum(end.num_reasoning_tokens for end in finished),
            accepted_prediction_tokens=sum(end.num_accepted for end in finished),
            rejected_prediction_tokens=sum(end.num_rejected for end in finished),
        ),
    )


def chat_completion(
    head: ResponseHead, answers: Sequence[Answer], body: ChatCompletionRequest, classifier: str | None
) -> ChatCompletion:
    """Return whole answers to one chat; for a refused input, the message has a `refusal` and no content.

    Args:
        classifier: public name of the classifier, if its verdicts are returned.
    """
    choices = []
    for index, answer in enumerate(answers):
        refusal = answer.finished.refusal
        message = AssistantMessage(
            content=(answer.text or (None if answer.calls else "")) if refusal is None else None,
            refusal=refusal,
            tool_calls=[_tool_call(call) for call in answer.calls] or None,
            reasoning_content=None if body.include_reasoning is False else answer.reasoning or None,
        )
        scores = chat_logprobs(answer.shown_scores, by_id=body.return_tokens_as_token_ids) if body.logprobs else None
        token_ids = answer.shown_ids if body.include_reasoning is False else answer.token_ids
        choices.append(
            ChatChoice(
                index=index,
                message=message,
                logprobs=scores,
                finish_reason=answer.finished.reason.value,
                stop_reason=stop_reason(answer.finished),
                token_ids=token_ids if body.return_token_ids else None,
            )
        )
    finished = [answer.finished for answer in answers]
    return ChatCompletion(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        choices=choices,
        usage=usage(finished, len(answers)),
        system_fingerprint=answers[0].started.fingerprint or None,
        service_tier=body.served_tier,
        prompt_logprobs=prompt_logprobs(answers[0].started, body.prompt_logprobs),
        prompt_token_ids=prompt_token_ids(answers[0].started, body),
        moderation=None if classifier is None else chat_moderation(finished, classifier),
    )


def stop_reason(finished: Finished) -> str | int | None:
    """Return the stop string or token of the request that ended an answer."""
    return finished.stop_id if finished.stop is None else finished.stop


def prompt_token_ids(started: Started, body: SamplingFields) -> list[int] | None:
    """Return the token ids of a prompt; None if they are not requested."""
    return list(started.prompt_ids) if body.return_token_ids else None


def prompt_logprobs(started: Started, num_top: int | None) -> PromptLogprobs | None:
    """Return a prompt's log-probabilities with `num_top` top tokens each; None if not requested or not available."""
    if num_top is None or not started.prompt_scores:
        return None
    return [
        None
        if score.logprob is None
        # If the token is among the top tokens, its rank is its position there.
        else {str(token.token_id): _prompt_logprob(token) for token in (score, *score.top[:num_top])}
        for score in started.prompt_scores
    ]


def _prompt_logprob(score: TokenScore) -> PromptLogprob:
    return {"logprob": _finite(score.logprob), "rank": score.rank, "decoded_token": score.text}


def echoed_scores(started: Started, num_top: int) -> tuple[TokenScore, ...]:
    """Return the scores of an echoed prompt, with `num_top` top tokens each."""
    if started.prompt_text is None:
        return ()
    return tuple(score._replace(top=score.top[:num_top]) for score in started.prompt_scores)


def chat_logprobs(scores: Iterable[TokenScore], *, by_id: bool | None = False) -> ChatLogprobs:
    """Return the scores of an answer, or of a piece of one, in the format of chats; `by_id` as for `TextScores`."""
    name = _name_of(by_id)
    content: list[ChosenLogprob] = [
        {**_token_logprob(score, name), "top_logprobs": [_token_logprob(top, name) for top in score.top]}
        for score in scores
    ]
    # Validation would copy all of it.
    return ChatLogprobs.model_construct(content=content)


def completion(head: ResponseHead, answers: Sequence[Answer], body: CompletionRequest) -> Completion:
    """Return whole text answers: of each prompt's adjacent answers, the `n` with the best mean logprob."""
    choices: list[CompletionChoice] = []
    for start in range(0, len(answers), body.num_computed):
        computed = answers[start : start + body.num_computed]
        if len(computed) > (body.n or 1):
            computed = sorted(computed, key=lambda answer: -answer.mean_logprob)[: body.n or 1]
        choices += [_completion_choice(len(choices) + index, answer, body) for index, answer in enumerate(computed)]
    return Completion(
        id=head.response_id,
        created=head.created_s,
        model=head.model,
        choices=choices,
        usage=usage([answer.finished for answer in answers], body.num_computed),
        system_fingerprint=answers[0].started.fingerprint or None,
    )


def _completion_choice(index: int, answer: Answer, body: CompletionRequest) -> CompletionChoice:
    logprobs = None
    if body.logprobs is not None:
        logprobs = TextScores(by_id=body.return_tokens_as_token_ids).next(
            echoed_scores(answer.started, body.logprobs) + answer.scores
        )
    return CompletionChoice(
        index=index,
        text=(answer.started.prompt_text or "") + answer.text,
        logprobs=logprobs,
        # A text completion has no calls.
        finish_reason=cast("WireFinishReason", answer.finished.reason.value),
        stop_reason=stop_reason(answer.finished),
        prompt_logprobs=prompt_logprobs(answer.started, body.prompt_logprobs),
        prompt_token_ids=prompt_token_ids(answer.started, body),
        token_ids=answer.token_ids if body.return_token_ids else None,
    )


def _tool_call(call: ToolCall) -> MessageToolCall:
    return MessageToolCall(id=call.call_id, function=FunctionCall(name=call.name, arguments=call.arguments))


class TextScores:
    """Scores in the format of text completions; offsets continue across the pieces of one choice.

    Args:
        by_id: name tokens `token_id:ID` instead of by their texts. Without it, a token that is no whole characters is
            named by its bytes, as OpenAI does: the texts of all such tokens are one and the same.
    """

    def __init__(self, *, by_id: bool | None = False) -> None:
        self._name = _name_of(by_id) if by_id else _text_or_bytes
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def next(self, scores: Iterable[TokenScore]) -> CompletionLogprobs:
        """Return the scores of the next piece."""
        scores = tuple(scores)
        offsets = []
        for score in scores:
            # A character may be spread over several tokens.
            offsets.append(self._offset + _num_broken(self._utf8.getstate()[0], score.raw))
            self._offset += len(self._utf8.decode(score.raw))
        return CompletionLogprobs(
            tokens=[self._name(score) for score in scores],
            token_logprobs=[None if score.logprob is None else _finite(score.logprob) for score in scores],
            top_logprobs=[self._top_by_name(score) for score in scores],
            text_offset=offsets,
        )

    def _top_by_name(self, score: TokenScore) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        # Most likely first; of tokens with equal names the most likely wins, but for the chosen one, always included.
        found: dict[str, float] = {}
        chosen = self._name(score)
        for token in (*score.top, score):
            is_chosen = token.token_id == score.token_id
            name = chosen if is_chosen else self._name(token)
            if is_chosen or name != chosen:
                found.setdefault(name, _finite(token.logprob))
        return found


def _name_of(by_id: bool | None) -> Callable[[TokenScore], str]:
    return (lambda score: f"token_id:{score.token_id}") if by_id else attrgetter("text")


def _text_or_bytes(score: TokenScore) -> str:
    if REPLACEMENT not in score.text or score.raw.decode("utf-8", "ignore").encode() == score.raw:
        return score.text
    printable = (chr(byte) if 0x20 <= byte < 0x7F and byte != ord("\\") else f"\\x{byte:02x}" for byte in score.raw)
    return "bytes:" + "".join(printable)


def _num_broken(unfinished: bytes, raw: bytes) -> int:
    """Return how many replacement characters an unfinished character becomes before bytes that do not go on with it."""
    try:
        codecs.utf_8_decode(unfinished + raw[:1], "strict", False)
    except UnicodeDecodeError:
        return len(unfinished.decode("utf-8", "replace"))
    return 0


def _token_logprob(score: TokenScore, name: Callable[[TokenScore], str]) -> TokenLogprob:
    return {"token": name(score), "logprob": _finite(score.logprob), "bytes": list(score.raw)}


def _finite(logprob: float | None) -> float:
    # JSON has no infinity; OpenAI uses this number for impossible tokens.
    return max(logprob if logprob is not None else LEAST_LOGPROB, LEAST_LOGPROB)
