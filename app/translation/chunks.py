"""Write the events of chats and text completions as the chunks of OpenAI's streams.

One frame of a chat stream with `include_usage` (one line, then an empty one):

    data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,
           "delta":{"content":"Hi"},"logprobs":null,"finish_reason":null}],"usage":null}
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import orjson

from app.http.errors import ApiError
from app.http.sse import DONE, frame
from app.schemas.chat import ChatCompletionRequest
from app.schemas.common import SamplingFields, StreamOptions, Usage
from app.schemas.completions import CompletionRequest
from app.translation.moderation import chat_moderation
from app.translation.render import (
    ResponseHead,
    TextScores,
    chat_logprobs,
    echoed_scores,
    prompt_logprobs,
    prompt_token_ids,
    stop_reason,
    usage,
)
from app.translation.streaming import ChoiceEvent
from deployments.answer_events import EndReason, Finished, Started, TextDelta, TokenScore

OBFUSCATION_STEP = 32
"""Chunk sizes are padded to multiples of this many characters."""


class _Frames:
    """Shared by chat and text streams: the fields of every chunk, and the usage chunk."""

    def __init__(self, head: ResponseHead, body: SamplingFields, *, kind: str) -> None:
        self._head: dict[str, Any] = {
            "id": head.response_id,
            "object": kind,
            "created": head.created_s,
            "model": head.model,
        }
        self._options = body.stream_options or StreamOptions()
        self._answers_per_prompt = body.n or 1
        self._counted: dict[int, Finished] = {}

    def closing(self) -> bytes:
        """Return the usage chunk, if requested, and the end mark."""
        if not self._options.include_usage:
            return DONE
        return frame(self._head | {"choices": [], "usage": self._counts().model_dump(mode="json")}) + DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the error event."""
        return frame(error.body())

    def _count(self, item: ChoiceEvent) -> None:
        """Record the token counts of an event."""
        match item.event:
            case Started(num_prompt_tokens=num_prompt, num_cached_tokens=num_cached, fingerprint=fingerprint):
                if fingerprint:
                    self._head["system_fingerprint"] = fingerprint
                self._counted[item.index] = Finished(
                    reason=EndReason.STOP,
                    num_prompt_tokens=num_prompt,
                    num_cached_tokens=num_cached,
                    num_completion_tokens=0,
                )
            case TextDelta(num_tokens=num_tokens):
                if self._options.continuous_usage_stats:
                    self._counted[item.index] = replace(self._counted[item.index], num_completion_tokens=num_tokens)
            case Finished() as finished:
                self._counted[item.index] = finished

    def _counts(self) -> Usage:
        return usage([self._counted[index] for index in sorted(self._counted)], self._answers_per_prompt)

    def _chunk(self, *choices: dict[str, Any], **more: Any) -> bytes:
        chunk = self._head | {"choices": choices} | more
        if self._options.include_usage:
            chunk["usage"] = self._counts().model_dump(mode="json") if self._options.continuous_usage_stats else None
        if self._options.include_obfuscation:
            size = len(orjson.dumps(choices))
            chunk["obfuscation"] = secrets.token_urlsafe(OBFUSCATION_STEP)[: 1 + -size % OBFUSCATION_STEP]
        return frame(chunk)


class ChatFrames(_Frames):
    """Writes the chunks of a chat: role, content deltas, an empty delta with the finish reason, moderation results.

    Args:
        classifier: public name of the classifier, if its verdicts are returned.
    """

    def __init__(self, head: ResponseHead, body: ChatCompletionRequest, *, classifier: str | None = None) -> None:
        super().__init__(head, body, kind="chat.completion.chunk")
        self._body = body
        self._classifier = classifier
        if body.served_tier is not None:
            self._head["service_tier"] = body.served_tier
        self._opened: set[int] = set()

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event; the first event of a choice also writes its role."""
        self._count(item)
        frames = b""
        if item.index not in self._opened:
            self._opened.add(item.index)
            frames = self._opening(item)
        if isinstance(item.event, TextDelta):
            frames += self._text(item.index, item.event)
        elif isinstance(item.event, Finished):
            if item.event.refusal is not None:
                frames += self._delta(item.index, {"refusal": item.event.refusal})
            frames += self._chunk({"index": item.index, "delta": {}, "logprobs": None} | _ending(item.event))
        return frames

    def closing(self) -> bytes:
        """Return the moderation chunk, if requested, and the frames that end any stream."""
        if self._classifier is None:
            return super().closing()
        finished = [self._counted[index] for index in sorted(self._counted)]
        found = chat_moderation(finished, self._classifier).model_dump(mode="json")
        return self._chunk(moderation=found) + super().closing()

    def _text(self, index: int, event: TextDelta) -> bytes:
        """Return the chunks of a piece of the answer; none if nothing of it is told, as of hidden reasoning.

        The first has the token ids, and the first that is not of reasoning has the scores.
        """
        if self._body.include_reasoning is False:
            event = replace(event, reasoning="", token_ids=event.shown_ids)
        is_answer = bool(event.text or event.calls or event.shown_scores)
        if not (is_answer or event.reasoning or event.token_ids):
            return b""
        logprobs = None
        if self._body.logprobs and is_answer:
            by_id = self._body.return_tokens_as_token_ids
            logprobs = chat_logprobs(event.shown_scores, by_id=by_id).model_dump(mode="json")
        token_ids = event.token_ids
        frames = b""
        for delta in _deltas(event):
            is_reasoning = "reasoning_content" in delta
            frames += self._delta(index, delta, logprobs=None if is_reasoning else logprobs, token_ids=token_ids)
            token_ids = ()
            if not is_reasoning:
                logprobs = None
        return frames

    def _opening(self, item: ChoiceEvent) -> bytes:
        """Return the chunk with the role, and what is requested of the prompt: its log-probabilities, its token ids."""
        more: dict[str, Any] = {}
        if isinstance(item.event, Started):
            found = prompt_logprobs(item.event, self._body.prompt_logprobs)
            more = {} if found is None else {"prompt_logprobs": found}
            if self._body.return_token_ids and item.index == 0:
                more["prompt_token_ids"] = item.event.prompt_ids
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._chunk({"index": item.index, "delta": delta, "logprobs": None, "finish_reason": None}, **more)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        token_ids: Sequence[int] = (),
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return self._chunk(choice | ({"token_ids": token_ids} if self._body.return_token_ids else {}))


def _ending(finished: Finished) -> dict[str, Any]:
    reason = stop_reason(finished)
    return {"finish_reason": finished.reason.value} | ({} if reason is None else {"stop_reason": reason})


def _deltas(event: TextDelta) -> Iterator[dict[str, Any]]:
    """Yield the deltas of an event: its reasoning, its content, then its calls one by one."""
    if event.reasoning:
        yield {"reasoning_content": event.reasoning}
    if event.text or not (event.reasoning or event.calls) or (event.shown_scores and not event.calls):
        yield {"content": event.text}
    for call in event.calls:
        delta: dict[str, Any] = {"index": call.index}
        if call.call_id is not None:
            delta |= {"id": call.call_id, "type": "function"}
        function = {"arguments": call.arguments}
        yield {"tool_calls": [delta | {"function": function if call.name is None else {"name": call.name} | function}]}


class CompletionFrames(_Frames):
    """Writes the chunks of text completions: the echo, pieces of text, then an empty text with the finish reason."""

    def __init__(self, head: ResponseHead, body: CompletionRequest) -> None:
        super().__init__(head, body, kind="text_completion")
        self._body = body
        self._scores_by_choice: dict[int, TextScores] = {}

    def event(self, item: ChoiceEvent) -> bytes:
        """Return the frames of one event."""
        self._count(item)
        match item.event:
            case Finished() as finished:
                return self._chunk({"index": item.index, "text": "", "logprobs": None} | _ending(finished))
            case TextDelta(text=text, scores=scores, token_ids=token_ids):
                choice = self._choice(item.index, text, scores)
                return self._chunk(choice | ({"token_ids": token_ids} if self._body.return_token_ids else {}))
            case Started() as started:
                return self._opening(item.index, started)

    def _opening(self, index: int, started: Started) -> bytes:
        """Return the chunk with the echo, the prompt's log-probabilities and token ids; empty if none is requested."""
        found = {
            "prompt_logprobs": prompt_logprobs(started, self._body.prompt_logprobs),
            "prompt_token_ids": prompt_token_ids(started, self._body),
        }
        told = {name: value for name, value in found.items() if value is not None}
        if not told and started.prompt_text is None:
            return b""
        choice = self._choice(index, started.prompt_text or "", echoed_scores(started, self._body.logprobs or 0))
        return self._chunk(choice | told)

    def _choice(self, index: int, text: str, scores: Iterable[TokenScore]) -> dict[str, Any]:
        logprobs = None
        if self._body.logprobs is not None:
            told = self._scores_by_choice.setdefault(
                index, TextScores(by_id=bool(self._body.return_tokens_as_token_ids))
            )
            logprobs = told.next(scores).model_dump(mode="json")
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}
