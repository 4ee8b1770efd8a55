"""A gateway's record of each answer, from its start to its end, however it ends, and the end of all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from adapters.identity import AdapterDigest, AdapterRef
from deployments.generation import ChatPrompt, ClientRequest, GenerationRequest, HealthReport
from deployments.pooled import EmbeddingRequest
from deployments.timeline import CANCELLED, Recorder, Timeline, TimelineStore
from engine.errors import EngineError, OverloadError, RequestError

_logger = logging.getLogger(__name__)

STOPPING = "The server is stopping."
RETRY_AFTER_S = 5.0
LAST_WORDS_S = 3.0
"""Time allowed for the error that ends an answer to reach its client."""
_POLL_S = 0.05


class AnswerLog:
    """The answers of one gateway. Bound to one event loop.

    Args:
        on_end: called once with each timeline, when its answer ends.
    """

    def __init__(self, on_end: Callable[[Timeline], None]) -> None:
        self._on_end = on_end
        self._timelines = TimelineStore()
        self._running: set[tuple[str, asyncio.Event]] = set()
        """For each running answer, the digest of its adapter and what is set when it ends."""
        self._is_draining = False

    def find(self, client_id: str) -> list[Timeline]:
        """Return the most recent answers to one client request, in start order."""
        return self._timelines.find(client_id)

    def adapters_in_use(self) -> frozenset[AdapterDigest]:
        """Return the adapters of running answers."""
        return frozenset(AdapterDigest(digest) for digest, _ in self._running if digest)

    async def until_unused(self, adapter: AdapterDigest) -> None:
        """Wait until the running answers that use an adapter have ended; those that begin later do not count."""
        for ended in [ended for digest, ended in self._running if digest == adapter]:
            await ended.wait()

    @contextmanager
    def answer(
        self,
        request: ClientRequest,
        base: str,
        adapter: AdapterRef | None = None,
    ) -> Iterator[Recorder]:
        """Record the answer that a `with` block produces; the block records a successful end, this any other.

        Raises:
            OverloadError: the gateway is draining.
        """
        timeline = Timeline(
            request_id=request.request_id,
            model=request.model,
            base=base,
            operation=_operation(request),
            adapter="" if adapter is None else adapter.digest,
            tenant=request.tenant,
            arrived_unix_s=time.time() - request.reception.now_s,
            trace_parent=request.trace_parent,
        )
        recorder = Recorder(timeline, self._on_end, reception=request.reception)
        running = timeline.adapter, asyncio.Event()
        self._running.add(running)
        self._timelines.add(timeline)
        try:
            if self._is_draining:
                raise OverloadError(STOPPING, retry_after_s=RETRY_AFTER_S)
            yield recorder
        except Exception as error:
            recorder.end(type(error).__name__)
            if isinstance(error, RequestError | OverloadError) and timeline.first_token_s is None:
                self._timelines.set_apart(timeline)
            if isinstance(error, EngineError):
                _logger.warning("request %s failed: %s", request.request_id, error)
            raise
        finally:
            # An answer without an end was abandoned by its client.
            recorder.end(CANCELLED)
            self._running.discard(running)
            running[1].set()

    def told(self, health: HealthReport) -> HealthReport:
        """Return the application's health with this gateway marked as stopping once it drains."""
        if not self._is_draining:
            return health
        return replace(health, state_by_part=health.state_by_part | {"gateway": STOPPING})

    async def drain(self, limit_s: float, fail_all: Callable[[Exception], None] | None) -> None:
        """Refuse new answers; return when the running ones have ended, at the latest `LAST_WORDS_S` after `limit_s`.

        Args:
            fail_all: ends the answers left after `limit_s` with an error; None if that is impossible.
        """
        self._is_draining = True
        loop = asyncio.get_running_loop()
        limit_at_s = loop.time() + limit_s
        while self._running and loop.time() < limit_at_s + LAST_WORDS_S:
            if fail_all is not None and loop.time() >= limit_at_s:
                fail_all(OverloadError(STOPPING, retry_after_s=RETRY_AFTER_S))
            await asyncio.sleep(_POLL_S)


def _operation(request: ClientRequest) -> str:
    match request:
        case EmbeddingRequest():
            return "embeddings"
        case GenerationRequest():
            return "chat" if isinstance(request.prompt, ChatPrompt) else "text_completion"
    return "rerank"
