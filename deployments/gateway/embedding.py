"""Vectors of one request in the gateway, embeddings or scores of an adapter's classifier.

Tokenize the inputs, pool each on a replica, truncate and normalize. Each input is a call of its own, so that a request
is spread over replicas and batched with other work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from functools import partial

import numpy as np

from adapters.identity import AdapterRef
from deployments.config import GatewayConfig
from deployments.errors import ABORTED
from deployments.gateway.resumption import Resumption
from deployments.gateway.served_model import ServedModel
from deployments.gateway.token_checks import adapter_start, check_vocabulary
from deployments.gateway.verdicts import AnswerJudge
from deployments.generation import TextPrompt, TokenPrompt
from deployments.generation_calls import GenerationCall, pack_ids
from deployments.pooled import EmbeddingRequest, Embeddings
from deployments.siblings import Siblings
from deployments.timeline import Recorder
from deployments.waits import patiently, side_by_side
from engine.errors import EngineError, OverloadError, RequestError
from engine.request import Emission, Pooling, RequestId, SamplingParams

MAX_CONCURRENT_INPUTS = 64
"""Bound per request, so that one request does not fill the queues that others wait in."""


class Embedding:
    """One request for embeddings, or for scores of an adapter's classifier.

    Args:
        judge: the safety classifier; called only if embeddings are screened.
    """

    def __init__(
        self,
        request: EmbeddingRequest,
        model: ServedModel,
        adapter: AdapterRef | None,
        *,
        config: GatewayConfig,
        judge: AnswerJudge,
        recorder: Recorder,
    ) -> None:
        self._request = request
        self._model = model
        self._adapter = adapter
        self._safety = config.safety
        self._judge = judge
        self._max_resumes = config.max_resumes
        self._recorder = recorder
        self._room = asyncio.Semaphore(MAX_CONCURRENT_INPUTS)
        self._siblings = Siblings()

    async def run(self) -> Embeddings:
        """Return the vectors.

        Raises:
            TimeoutError: the deadline has passed.
            RequestError, OverloadError, EngineError: as raised by the tokenizer, the classifier and the engine.
        """
        is_class = self._request.pooling is Pooling.CLASS
        if is_class and (self._adapter is None or not self._adapter.num_labels):
            raise RequestError.about("model", "has no classifier; name an adapter that was trained for SEQ_CLS.")
        width, asked = self._model.config.hidden_size, self._request.dimensions
        if asked is not None and asked > width:
            raise RequestError.about("dimensions", f"is {asked}; this model's vectors have {width}.")
        async with asyncio.timeout(self._request.timeout_s):
            with self._recorder.stage("tokenize"):
                token_ids = await side_by_side(map(self._encode, range(len(self._request.inputs))))
            num_tokens = sum(map(len, token_ids))
            self._recorder.timeline.num_prompt_tokens = num_tokens
            await self._screen()
            with self._recorder.stage("vectors"):
                results = await side_by_side(map(self._pooled, token_ids))
        self._recorder.timeline.num_cached_tokens = sum(result.num_cached_tokens for result in results)
        vectors = tuple(scaled(result.pooled or b"", asked, self._request.normalizes) for result in results)
        return Embeddings(vectors=vectors, num_prompt_tokens=num_tokens)

    async def _screen(self) -> None:
        if self._safety is None or not self._safety.screen_embeddings:
            return
        texts = [
            prompt.text if isinstance(prompt, TextPrompt) else self._model.codec.pieces.decode(prompt.token_ids)
            for prompt in self._request.inputs
        ]
        with self._recorder.stage("safety"):
            verdicts = await patiently(partial(self._judge, texts), self._safety.timeout_s)
        for index, verdict in enumerate(verdicts):
            if verdict.flagged:
                field = self._field(index)
                raise RequestError.about(
                    field, "was refused by the safety classifier.", code="content_policy_violation"
                )

    async def _encode(self, index: int) -> Sequence[int]:
        prompt, field = self._request.inputs[index], self._field(index)
        if isinstance(prompt, TokenPrompt):
            token_ids: Sequence[int] = prompt.token_ids
        else:
            try:
                async with self._room:
                    token_ids = await self._model.encode(prompt, (self._adapter, self._request.tenant))
            except RequestError as error:
                # The tokenizer's message calls every text "prompt".
                message = error.message.replace("prompt", f"'{field}'", 1)
                raise RequestError(message, field=field, code=error.code) from error
            end = self._model.codec.omitted_end
            token_ids = token_ids if end is None else (*token_ids, end)
        if not token_ids:
            raise RequestError.about(field, "has no tokens; at least 1 is needed.")
        limit = self._model.config.max_model_len
        if len(token_ids) > limit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens. However, '{field}' has {len(token_ids)}.",
                field=field,
                code="context_length_exceeded",
            )
        check_vocabulary(token_ids, self._model.config.vocab_size, field=field)
        return token_ids

    async def _pooled(self, token_ids: Sequence[int]) -> Emission:
        """Return the vector of an input; one that finds no room beside others of the request waits for one of them."""
        part = object()
        async with self._room:
            while True:
                try:
                    with self._siblings.asked(part):
                        return await self._ask(token_ids)
                except OverloadError as error:
                    if not self._siblings.may_wait(error):
                        raise
                await self._siblings.until_room()

    async def _ask(self, token_ids: Sequence[int]) -> Emission:
        call = GenerationCall(
            request_id=RequestId(self._request.request_id),
            prompt_ids=pack_ids(token_ids),
            tokenizer_digest=self._model.config.tokenizer_digest,
            params=SamplingParams(max_tokens=0),
            pooling=self._request.pooling or Pooling(self._model.config.pooling),
            adapter=self._adapter,
            adapter_start=adapter_start(self._adapter, token_ids, self._model.codec.pieces.spelling, field="input"),
            tenant=self._request.tenant or self._request.salt,
            salt=self._request.salt,
            priority=self._request.priority,
            timeout_s=self._recorder.left_s(self._request.timeout_s),
        )
        attempts = Resumption(
            self._model.source, call, max_resumes=self._max_resumes, on_attempt=self._recorder.note_attempt
        )
        async with aclosing(attempts.tokens()) as batches:
            async for batch in batches:
                if batch.pooled is not None:
                    return batch
        raise EngineError(ABORTED)

    def _field(self, index: int) -> str:
        return "input" if len(self._request.inputs) == 1 else f"input[{index}]"


def scaled(vector: bytes, dimensions: int | None, normalizes: bool) -> bytes:
    """Return the first `dimensions` numbers of a vector, scaled to unit length if `normalizes`.

    Args:
        vector: float32, little-endian, as is the result.
    """
    numbers = np.frombuffer(vector, "<f4")[:dimensions].astype(np.float64)
    length = float(np.linalg.norm(numbers)) if normalizes else 0.0
    return (numbers / length if length else numbers).astype("<f4").tobytes()
