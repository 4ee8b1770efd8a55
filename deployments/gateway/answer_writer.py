"""Makes the events of one answer of its tokens and its text."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from adapters.identity import AdapterRef
from deployments.answer_events import EndReason, Finished, Moderated, Started, TextDelta, TokenScore, Verdict
from deployments.errors import ABORTED
from deployments.gateway.answer_shape import AnswerParts
from deployments.gateway.served_model import ServedModel
from deployments.gateway.token_scores import scored_prompt
from deployments.generation import GenerationRequest, TextPrompt
from deployments.stream.harmony import HarmonyParts, Parts
from deployments.stream.stream_handler import HeldToken, StreamHandler
from deployments.timeline import Recorder
from engine.errors import EngineError
from engine.request import Emission, FinishReason

REFUSAL = "I can't help with that request."


class AnswerWriter:
    """Makes the events of one answer, and records its end."""

    def __init__(
        self,
        request: GenerationRequest,
        model: ServedModel,
        adapter: AdapterRef | None,
        recorder: Recorder,
        prompt_ids: Sequence[int],
    ) -> None:
        self._request = request
        self._model = model
        self._adapter = adapter
        self._recorder = recorder
        self._prompt_ids = prompt_ids
        self._content: deque[range] = deque()

    def started(self, first: Emission) -> Started:
        """Return the first event of an answer, given its first tokens."""
        prompt_text: str | None = None
        prompt_scores: tuple[TokenScore, ...] = ()
        if self._request.echoes:
            prompt = self._request.prompt
            prompt_text = (
                prompt.text if isinstance(prompt, TextPrompt) else self._model.codec.pieces.decode(self._prompt_ids)
            )
        if self._request.params.num_prompt_logprobs is not None:
            # Special tokens that the client typed into the prompt stay visible.
            special_ids = self._model.dialect.special_ids
            hidden = {token_id for mark, token_id in special_ids.items() if mark not in (prompt_text or "")}
            prompt_scores = scored_prompt(
                self._model.codec.pieces.spelling,
                self._prompt_ids,
                first.prompt_logprobs,
                hidden=hidden,
                text=prompt_text,
            )
        return Started(
            num_prompt_tokens=len(self._prompt_ids),
            num_cached_tokens=first.num_cached_tokens,
            fingerprint=self._fingerprint(),
            prompt_text=prompt_text,
            prompt_scores=prompt_scores,
            prompt_ids=self._told_ids,
        )

    def refusal(self, verdict: Verdict) -> tuple[Started, Finished]:
        """Return all events of an answer to a flagged input."""
        num_prompt = len(self._prompt_ids)
        self._end(EndReason.CONTENT_FILTER, 0)
        return (
            Started(
                num_prompt_tokens=num_prompt,
                num_cached_tokens=0,
                fingerprint=self._fingerprint(),
                prompt_ids=self._told_ids,
            ),
            Finished(
                reason=EndReason.CONTENT_FILTER,
                num_prompt_tokens=num_prompt,
                num_completion_tokens=0,
                num_cached_tokens=0,
                refusal=REFUSAL,
                moderation=None if self._request.moderation is None else Moderated(input=verdict, output=None),
            ),
        )

    def deltas(self, parts: AnswerParts | HarmonyParts, text: str, handler: StreamHandler) -> Iterator[TextDelta]:
        """Yield what is new in the answer, in its order, given the text that was released last."""
        num_behind = len(text)
        for piece in parts.pieces(text):
            num_behind -= len(piece)
            yield from self._delta(parts.feed(piece), parts, handler, num_behind + parts.num_held)

    def last_deltas(self, parts: AnswerParts | HarmonyParts, handler: StreamHandler) -> Iterator[TextDelta]:
        """Yield what was held back, if anything."""
        return self._delta(parts.close(), parts, handler, 0)

    def _delta(
        self, found: Parts, parts: AnswerParts | HarmonyParts, handler: StreamHandler, num_behind: int
    ) -> Iterator[TextDelta]:
        reasoning, text, calls = found
        tokens = handler.take_tokens(num_behind)
        shown = tuple(token for token in tokens if parts.is_shown(token.start, token.end))
        scores = _scores(tokens)
        returns_ids = self._request.returns_token_ids
        token_ids = tuple(token.token_id for token in tokens) if returns_ids else ()
        if text and self._request.params.num_logprobs is not None:
            self._content.append(parts.content_range)
        if reasoning or text or calls or scores or token_ids:
            yield TextDelta(
                text=text,
                reasoning=reasoning,
                calls=calls,
                scores=scores,
                text_scores=tuple(self._text_scores(tokens)),
                shown_scores=_scores(shown),
                token_ids=token_ids,
                shown_ids=tuple(token.token_id for token in shown) if returns_ids else (),
                num_tokens=handler.num_tokens,
            )

    def _text_scores(self, tokens: Iterable[HeldToken]) -> Iterator[TokenScore]:
        """Yield the scores of the tokens that have characters of the content; tokens come no sooner than it."""
        for token in tokens:
            while self._content and self._content[0].stop <= token.start:
                self._content.popleft()
            is_content = bool(self._content) and self._content[0].start < token.end and token.start < token.end
            # What has no bytes is a mark; where it ends an incomplete character, that one's place is its own.
            if is_content and token.score is not None and token.score.raw:
                yield token.score

    def finished(
        self, text: StreamHandler, parts: AnswerParts | HarmonyParts, last: Emission, moderation: Moderated | None
    ) -> Finished:
        """Return the last event of an answer, given its last tokens.

        Raises:
            EngineError: the engine has given up on it.
        """
        if text.is_flagged:
            reason = EndReason.CONTENT_FILTER
        elif self._request.max_tokens == 0:
            reason = EndReason.LENGTH
        # A token after the one that completed the stop string may be in the last batch, or not.
        elif parts.has_calls and (text.is_cut or last.finish_reason is not FinishReason.LENGTH):
            reason = EndReason.TOOL_CALLS
        elif text.is_cut or last.finish_reason is FinishReason.STOP:
            reason = EndReason.STOP
        elif last.finish_reason is FinishReason.LENGTH:
            reason = EndReason.LENGTH
        else:
            raise EngineError(ABORTED)
        self._end(reason, text.num_tokens)
        last_ids = last.token_ids[-1:] if reason is EndReason.STOP and not text.is_cut else ()
        return Finished(
            reason=reason,
            num_prompt_tokens=len(self._prompt_ids),
            num_completion_tokens=text.num_tokens,
            num_cached_tokens=last.num_cached_tokens,
            num_reasoning_tokens=text.num_reasoning_tokens,
            # A stop string may have cut off the last tokens.
            num_accepted=min(last.num_accepted, text.num_tokens),
            num_rejected=last.num_rejected,
            stop=text.stop if reason is EndReason.STOP else None,
            stop_id=next((token_id for token_id in last_ids if token_id in self._request.params.stop_token_ids), None),
            moderation=moderation,
        )

    @property
    def _told_ids(self) -> tuple[int, ...]:
        return tuple(self._prompt_ids) if self._request.returns_token_ids else ()

    def _fingerprint(self) -> str:
        adapter = "" if self._adapter is None else self._adapter.digest
        return "fp_" + hashlib.sha256(f"{self._model.config.fingerprint} {adapter}".encode()).hexdigest()[:16]

    def _end(self, reason: EndReason, num_tokens: int) -> None:
        # Record what the client is told: tokens after a stop string are not billed.
        self._recorder.timeline.num_tokens = num_tokens
        self._recorder.end(reason.value)


def _scores(tokens: Iterable[HeldToken]) -> tuple[TokenScore, ...]:
    return tuple(token.score for token in tokens if token.score is not None)
