"""The lifetime of one answer in the gateway: prompt encoding and input verdict, tokens, text, end.

Input screening modes: "before" (no engine work until the verdict is there) and "alongside" (the engine starts at once,
and nothing is shown until the verdict is there).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from adapters.identity import AdapterRef
from deployments.answer_events import (
    GenerationEvent,
    TokenScore,
    Verdict,
)
from deployments.config import GatewayConfig
from deployments.gateway.answer_safety import AnswerSafety, texts_of
from deployments.gateway.answer_shape import AnswerShape, shape_of
from deployments.gateway.answer_writer import AnswerWriter
from deployments.gateway.resumption import Resumption
from deployments.gateway.served_model import ServedModel
from deployments.gateway.token_checks import (
    adapter_start,
    answer_room,
    check_prompt_scores,
    check_some_are_left,
    check_token_ids,
    check_vocabulary,
)
from deployments.gateway.token_scores import scored
from deployments.gateway.verdicts import AnswerJudge
from deployments.generation import ChatPrompt, GenerationRequest, TextPrompt, TokenPrompt
from deployments.generation_calls import GenerationCall, UsageTag, pack_ids
from deployments.metrics import GatewayMetrics
from deployments.stream.stream_handler import StreamHandler
from deployments.timeline import Recorder
from deployments.waits import side_by_side
from engine.errors import GrammarError, RequestError
from engine.request import DryPenalty, Emission, FinishReason, RequestId

NUM_TAIL_TOKENS = 16
"""How many of the prompt's last tokens are searched for an open reasoning section, which a template may begin."""


class Answering:
    """One generation from its request to its last event.

    Args:
        judge: the safety classifier; not called if none is configured.
    """

    def __init__(
        self,
        request: GenerationRequest,
        model: ServedModel,
        adapter: AdapterRef | None,
        *,
        config: GatewayConfig,
        judge: AnswerJudge,
        metrics: GatewayMetrics,
        recorder: Recorder,
    ) -> None:
        self._request = request
        self._model = model
        self._adapter = adapter
        self._flow = (adapter, request.tenant)
        self._safety = AnswerSafety(config.safety, request.moderation, judge=judge, recorder=recorder)
        self._max_resumes = config.max_resumes
        self._metrics = metrics
        self._recorder = recorder
        self._prompt_ids: Sequence[int] = ()

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events; closing the iterator frees the request in the engine.

        Raises:
            TimeoutError: the deadline has passed.
            RequestError, OverloadError, EngineError: as raised by the tokenizer, the classifier and the engine.
        """
        verdict = asyncio.ensure_future(self._verdict())
        verdict.add_done_callback(_seen)
        try:
            async with asyncio.timeout(self._left_s()):
                with self._recorder.stage("tokenize"):
                    self._prompt_ids, predicted = await side_by_side(
                        (self._encode(), self._model.prediction_ids(self._request.prediction, self._flow))
                    )
                self._recorder.timeline.num_prompt_tokens = len(self._prompt_ids)
                told = AnswerWriter(self._request, self._model, self._adapter, self._recorder, self._prompt_ids)
                # Only a reasoning model needs to know how the prompt ends.
                tail = "" if self._model.dialect.reasoning is None else self._prompt_tail()
                shape = shape_of(self._request, self._model.dialect, tail)
                call = self._call(shape, await shape.grammar(), await self._dry_penalty(), predicted)
                # A verdict that is there by now saves the engine's work.
                refused = await self._refused(verdict) if self._safety.is_first or verdict.done() else None
            if refused is not None:
                for refusal in told.refusal(refused):
                    yield refusal
                return
            async with aclosing(self._answer(call, shape, told, verdict)) as events:
                while (event := await self._next(events)) is not None:
                    yield event
        except GrammarError as error:
            raise shape.refused(error) from None
        finally:
            verdict.cancel()

    async def _next(self, events: AsyncGenerator[GenerationEvent, None]) -> GenerationEvent | None:
        if self._request.timeout_s is None:
            return await anext(events, None)
        async with asyncio.timeout(self._left_s()):
            return await anext(events, None)

    def _left_s(self) -> float | None:
        return self._recorder.left_s(self._request.timeout_s)

    async def _encode(self) -> Sequence[int]:
        prompt = self._request.prompt
        token_ids: Sequence[int]
        if isinstance(prompt, TokenPrompt):
            token_ids = prompt.token_ids
        else:
            token_ids = await self._model.encode(prompt, self._flow)
        # Checked for encoded text too: a tokenizer may have more tokens than the model.
        check_vocabulary(token_ids, self._model.config.vocab_size, field=self._prompt_field)
        return token_ids

    @property
    def _prompt_field(self) -> str:
        return "messages" if isinstance(self._request.prompt, ChatPrompt) else "prompt"

    def _prompt_tail(self) -> str:
        spellings = map(self._model.codec.pieces.spelling, self._prompt_ids[-NUM_TAIL_TOKENS:])
        return b"".join(spellings).decode("utf-8", "replace")

    async def _dry_penalty(self) -> DryPenalty | None:
        penalty = self._request.params.dry
        if penalty is None:
            return None
        texts = self._request.dry_breakers
        return replace(penalty, breakers=await asyncio.to_thread(self._model.codec.breakers, texts))

    def _call(
        self, shape: AnswerShape, grammar: str | None, dry: DryPenalty | None, predicted: Sequence[int]
    ) -> GenerationCall:
        limit, num_prompt = self._model.config.max_model_len, len(self._prompt_ids)
        field = self._prompt_field
        if not num_prompt:
            raise RequestError.about(field, "has no tokens; at least 1 is needed.")
        max_tokens = answer_room(self._request, num_prompt, limit, field=field)
        check_token_ids(self._request.params, self._model.config.vocab_size)
        check_prompt_scores(self._request, num_prompt)
        bad_words = (self._model.codec.encode_word(word) for word in self._request.bad_words)
        params = replace(
            self._request.params,
            max_tokens=max_tokens,
            stop_token_ids=(*self._request.params.stop_token_ids, *shape.stop_ids),
            grammar=grammar,
            dry=dry,
            bad_words=tuple(spelling for spellings in bad_words for spelling in spellings),
        )
        check_some_are_left(params, self._model.config.eos_ids)
        return GenerationCall(
            request_id=RequestId(self._request.request_id),
            prompt_ids=pack_ids(self._prompt_ids),
            tokenizer_digest=self._model.config.tokenizer_digest,
            params=params,
            adapter=self._adapter,
            adapter_start=adapter_start(
                self._adapter, self._prompt_ids, self._model.codec.pieces.spelling, field=self._prompt_field
            ),
            tenant=self._request.tenant or self._request.salt,
            salt=self._request.salt,
            retention_s=self._request.retention_s,
            priority=self._request.priority,
            timeout_s=self._left_s(),
            prediction_ids=pack_ids(predicted),
            usage=UsageTag(
                self._request.request_id,
                self._request.tenant,
                self._request.model,
                self._recorder.timeline.arrived_unix_s,
            ),
        )

    async def _verdict(self) -> Verdict | None:
        try:
            return await self._safety.judge_input(self._input_texts)
        except RequestError as error:
            # The classifier calls the texts "input[0]", "input[1]" and so on, which are not those of a field.
            message = error.message.replace(f"'{error.field}'", f"'{self._prompt_field}'", 1)
            raise RequestError(message, field=self._prompt_field, code=error.code) from error

    async def _refused(self, verdict: asyncio.Future[Verdict | None]) -> Verdict | None:
        """Return the verdict that refuses the request, or None if it passes."""
        found = await verdict if self._safety.blocks_input else None
        return found if found is not None and found.flagged else None

    def _input_texts(self) -> list[str]:
        prompt = self._request.prompt
        if isinstance(prompt, TextPrompt):
            return [text for text in (prompt.text, prompt.suffix) if text] or [""]
        if isinstance(prompt, TokenPrompt):
            return [self._model.codec.pieces.decode(prompt.token_ids)]
        return texts_of(prompt)

    async def _answer(
        self, call: GenerationCall, shape: AnswerShape, told: AnswerWriter, verdict: asyncio.Future[Verdict | None]
    ) -> AsyncGenerator[GenerationEvent, None]:
        base = self._model.config.name
        attempts = Resumption(
            self._model.source,
            call,
            max_resumes=self._max_resumes,
            on_attempt=self._recorder.note_attempt,
            on_resume=lambda: self._metrics.count_resumption(base),
        )
        text, parts, hidden = self._stream_handler(shape), shape.parts(), shape.hidden
        last_s: float | None = None
        async with aclosing(attempts.tokens()) as batches:
            async for batch in batches:
                self._recorder.note_tokens(len(batch.token_ids), batch.num_cached_tokens)
                if last_s is None:
                    refused = await self._refused(verdict)
                    if refused is not None:
                        for event in told.refusal(refused):
                            yield event
                        return
                    yield told.started(batch)
                last_s = self._measure(len(batch.token_ids), last_s)
                if self._request.max_tokens == 0:
                    break
                piece = await self._fed(text, batch, hidden)
                self._recorder.timeline.detokenize_s = text.detokenize_s
                for delta in told.deltas(parts, piece, text):
                    yield delta
                if text.is_cut or text.is_flagged or batch.finish_reason is not None:
                    break
        for delta in told.deltas(parts, await text.close(), text):
            yield delta
        for delta in told.last_deltas(parts, text):
            yield delta
        yield told.finished(text, parts, batch, await self._safety.told(verdict, text.text))

    async def _fed(self, text: StreamHandler, batch: Emission, hidden: frozenset[int]) -> str:
        scores: tuple[TokenScore, ...] = ()
        if batch.logprobs:
            scores = scored(self._model.codec.pieces.spelling, batch.token_ids, batch.logprobs, hidden=hidden)
        if batch.finish_reason is not FinishReason.STOP or self._shows_end(batch.token_ids[-1]):
            return await text.feed(batch.token_ids, scores)
        # The token that ended the answer is counted but not shown.
        piece = await text.feed(batch.token_ids[:-1], scores[:-1])
        if not text.is_cut:
            # A text completion returns one score per token: evaluations rely on it. A chat returns those of its text.
            is_told = bool(scores) and not isinstance(self._request.prompt, ChatPrompt)
            text.end(batch.token_ids[-1], scores[-1] if is_told else None)
        return piece

    def _shows_end(self, token_id: int) -> bool:
        request = self._request
        return request.keeps_stop and (request.shows_special or token_id in request.params.stop_token_ids)

    def _stream_handler(self, shape: AnswerShape) -> StreamHandler:
        prompt = self._request.prompt
        continues = not isinstance(prompt, ChatPrompt) or prompt.continues_final_message
        before = self._prompt_ids if continues else ()
        return StreamHandler(
            self._model.codec.pieces.new_detokenizer(
                shape.shown, before=before, shows_special=self._request.shows_special
            ),
            shape.stops(),
            screen=self._safety.screen(),
            judge=self._safety.judge_output,
            reasoning=shape.counter(),
            min_tokens=self._request.params.min_tokens,
            holds_ids=self._request.returns_token_ids,
        )

    def _measure(self, num_tokens: int, last_s: float | None) -> float:
        now_s = self._recorder.now_s
        if last_s is None:
            self._metrics.count_first_token(self._model.config.name, now_s)
        elif num_tokens:
            self._metrics.count_tokens(self._model.config.name, num_tokens, now_s - last_s)
        return now_s


def _seen(verdict: asyncio.Future[Verdict | None]) -> None:
    """Retrieve the exception of a verdict that nobody awaits, so that asyncio does not log it as never retrieved."""
    if not verdict.cancelled():
        verdict.exception()
