"""Resume a generation on another replica when its own is lost, with the tokens so far as prior output.

Sampling depends only on (seed, position), so the continuation is what the lost replica would have produced.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Protocol

from deployments.errors import ReplicaLostError, UnavailableError
from deployments.generation_calls import GenerationCall, pack_ids, unpack_ids
from deployments.siblings import FULL
from engine.errors import OverloadError
from engine.request import Emission, FinishReason, RequestId

_logger = logging.getLogger(__name__)

MAX_WAIT_S = 120.0
"""How long a generation that has lost its replica waits for another one, or for room on it."""
_POLL_S = 0.25


class TokenSource(Protocol):
    """The replicas of one base model, any of which can serve a call."""

    def tokens(self, call: GenerationCall) -> AsyncGenerator[Emission, None]:
        """Yield the output of one attempt, coalesced as it arrives; closing the iterator frees the request.

        Raises:
            ReplicaLostError: the replica was lost during the attempt.
            UnavailableError: no replica is available.
            RequestError, OverloadError, EngineError: as raised by the replica.
        """
        ...


class Resumption:
    """The attempts at one generation.

    Args:
        call: the template of all attempts; each gets its own id. One with prior output has begun: it waits for room and
            for replicas before any is lost.
        on_attempt: called with the id of each attempt.
        on_resume: called before each attempt after a lost replica.
    """

    def __init__(
        self,
        source: TokenSource,
        call: GenerationCall,
        *,
        max_resumes: int,
        on_attempt: Callable[[RequestId], None] = lambda _: None,
        on_resume: Callable[[], None] = lambda: None,
    ) -> None:
        self._source = source
        self._call = call
        self._max_resumes = max_resumes
        self._on_attempt = on_attempt
        self._on_resume = on_resume
        self._token_ids = list(unpack_ids(call.prior_output_ids))
        self._num_cached_tokens = 0
        # Accepted and rejected draft tokens: in total, and on the lost replicas alone.
        self._counted = self._counted_before = (0, 0)
        self._lost_at_s: float | None = None
        self._started_s = time.monotonic()
        self._waits_since_s = self._started_s if self._token_ids else None

    async def tokens(self) -> AsyncGenerator[Emission, None]:
        """Yield the output of all attempts together; closing the iterator frees the request.

        Raises:
            ReplicaLostError: the last allowed attempt has lost its replica too.
            UnavailableError, RequestError, OverloadError, EngineError: as `TokenSource.tokens`.
        """
        num_resumes = 0
        while True:
            try:
                async with aclosing(self._source.tokens(self._attempt(num_resumes))) as batches:
                    async for batch in batches:
                        yield self._noted(batch)
                        if batch.finish_reason is not None:
                            return
            except ReplicaLostError as error:
                if num_resumes == self._max_resumes:
                    raise
                num_resumes += 1
                _logger.warning("a replica was lost after %d tokens (%s)", len(self._token_ids), error)
                self._lost_at_s = self._waits_since_s = time.monotonic()
                self._counted_before = self._counted
                # A request for a vector has a limit of 0.
                if 0 < self._call.params.max_tokens <= len(self._token_ids):
                    yield self._noted(Emission(request_id=self._call.request_id, finish_reason=FinishReason.LENGTH))
                    return
                self._on_resume()
            except OverloadError as error:
                if not self._may_wait(error):
                    raise
                await asyncio.sleep(_POLL_S)

    def _may_wait(self, error: OverloadError) -> bool:
        """Return whether a refused attempt is repeated: one that has not begun is refused, as its client can retry.

        A generation that lost its replica waits for a successor and, if it has tokens, for room on the others.
        """
        if self._waits_since_s is None or time.monotonic() - self._waits_since_s > MAX_WAIT_S:
            return False
        return isinstance(error, UnavailableError) or (bool(self._token_ids) and error.reason in FULL)

    def _attempt(self, num_resumes: int) -> GenerationCall:
        timeout_s = self._call.timeout_s
        if timeout_s is not None:
            timeout_s = max(0.0, timeout_s - (time.monotonic() - self._started_s))
        # A new id for each attempt: a lost one may still run, and send, on its replica.
        request_id = RequestId(f"{uuid.uuid4().hex}-{num_resumes}")
        self._on_attempt(request_id)
        return replace(
            self._call,
            request_id=request_id,
            prior_output_ids=pack_ids(self._token_ids),
            timeout_s=timeout_s,
        )

    def _noted(self, batch: Emission) -> Emission:
        if self._lost_at_s is None or not self._token_ids:
            self._num_cached_tokens = batch.num_cached_tokens or self._num_cached_tokens
        # A second replica computes the prompt's log-probabilities again; a reader that has tokens has had them.
        prompt_logprobs = () if self._token_ids else batch.prompt_logprobs
        self._token_ids.extend(batch.token_ids)
        accepted, rejected = self._counted_before
        self._counted = batch.num_accepted + accepted, batch.num_rejected + rejected
        if self._lost_at_s is None and batch.num_cached_tokens == self._num_cached_tokens:
            # The common case. A copy would cost more than everything else here.
            return batch
        return replace(
            batch,
            num_cached_tokens=self._num_cached_tokens,
            num_accepted=self._counted[0],
            num_rejected=self._counted[1],
            prompt_logprobs=prompt_logprobs,
        )
