"""The safety classifier as one gateway asks it: within a time limit, and for a bounded number of inputs at a time.

Texts of running answers need no place and go first, because they hold back what has been computed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Protocol

from ray.serve.handle import DeploymentHandle

from deployments.answer_events import Verdict
from deployments.batched_model import limited
from deployments.classifiers.safety import Safety, ask_safety
from deployments.config import SafetyConfig
from deployments.handle_calls import reached
from deployments.room import Room
from engine.errors import EngineError, OverloadError, RequestError

_logger = logging.getLogger(__name__)

PASSED, FLAGGED, MISSING = "passed", "flagged", "missing"


class AnswerJudge(Protocol):
    """Judges texts of one answer."""

    async def __call__(self, texts: Sequence[str], *, is_running: bool = False) -> Sequence[Verdict]:
        """Return the verdict on each text; `is_running` if the model has written them."""
        ...


class Verdicts:
    """Verdicts for one gateway.

    Args:
        config: None if there is no classifier.
        handle: None to run it in the gateway's own process.

    Attributes:
        num_by_outcome: texts that passed or were flagged, and texts of generations that there was no verdict on in
            time; empty without a classifier.
    """

    def __init__(self, config: SafetyConfig | None, handle: DeploymentHandle | None) -> None:
        self._config = config
        self._handle = handle
        self._classify: Callable[[Sequence[str], bool], Awaitable[Sequence[Verdict] | OverloadError]] | None = None
        self._room = Room()
        self.num_by_outcome = {} if config is None else dict.fromkeys((PASSED, FLAGGED, MISSING), 0)

    async def start(self) -> None:
        """Load the classifier, or find its deployment."""
        if self._handle is not None:
            self._classify = partial(ask_safety, self._handle)
        elif self._config is not None:
            self._classify = (await asyncio.to_thread(Safety, self._config)).judge

    async def of(self, flow: Hashable, texts: Sequence[str]) -> Sequence[Verdict]:
        """Return the verdict on each text, in order. The time limit holds for the place, and again once it is there.

        Args:
            flow: takes turns with other flows if many texts wait.

        Raises:
            RequestError: there is no classifier, or it cannot take these texts.
            OverloadError: it cannot be reached in time, or is overloaded.
        """
        with self._limit(texts) as limit_s:
            async with self._room.timed_place(flow, limit_s, max_wait_s=limit_s):
                return await self._found(texts)

    async def of_answer(self, flow: Hashable, texts: Sequence[str], *, is_running: bool = False) -> Sequence[Verdict]:
        """Return the verdicts on texts of a generation: if the classifier cannot, they pass unless `fails_closed`.

        Raises the same errors as `of`. The time limit begins once an input has its place.
        """
        try:
            with self._limit(texts) as limit_s:
                if is_running:
                    async with asyncio.timeout(limit_s):
                        return await self._found(texts, is_urgent=True)
                async with self._room.timed_place(flow, limit_s):
                    return await self._found(texts)
        except (OverloadError, EngineError) as error:
            assert self._config is not None
            self.num_by_outcome[MISSING] += len(texts)
            if self._config.fails_closed:
                raise
            _logger.warning("%d texts pass without moderation: %s", len(texts), error)
            return [Verdict(score_by_hazard={}, flagged=(), error=str(error)) for _ in texts]

    def _limit(self, texts: Sequence[str]) -> AbstractContextManager[float]:
        if self._config is None:
            raise RequestError("This server has no safety classifier.", field="model", code="model_not_found")
        sizes = list(map(len, texts))
        return limited("The safety classifier gave no verdict", self._config.timeout_s, sizes, self._config.max_batch)

    async def _found(self, texts: Sequence[str], *, is_urgent: bool = False) -> Sequence[Verdict]:
        assert self._classify is not None
        found = await reached("safety classifier", partial(self._classify, texts, is_urgent))
        if isinstance(found, OverloadError):
            raise found
        for verdict in found:
            self.num_by_outcome[FLAGGED if verdict.flagged else PASSED] += 1
        return found
