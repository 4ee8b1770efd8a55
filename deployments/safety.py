"""The safety deployment and the two ways to reach a classifier: in this process, or over a Serve handle.

Texts that arrive together, from whatever request, share a forward pass, which runs in a thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.config import SafetyConfig
from deployments.generation import Verdict
from deployments.handle_errors import unwrap
from engine.errors import EngineError, RequestError

if TYPE_CHECKING:
    from deployments.classifier import Classifier

_FIRST = "The first text that a classifier judges."
MAX_FORWARD_S = 60.0
"""A forward pass that takes longer has hung."""


class SafetyPort(Protocol):
    """What a gateway asks of a safety classifier."""

    async def judge(self, texts: Sequence[str]) -> list[Verdict]:
        """Return a verdict on each text, in order.

        Raises:
            RequestError: as `Classifier.check`.
        """
        ...


class LocalSafety:
    """A classifier in this process; serves one event loop.

    Loads the classifier, unless it is given one: errors as `Classifier`.
    """

    def __init__(
        self,
        config: SafetyConfig,
        classifier: Classifier | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if classifier is None:
            # It brings torch along, which a gateway that only asks for verdicts can do without.
            from deployments.classifier import Classifier

            classifier = Classifier(config)
            # The first pass is many times slower than those that follow; no request shall wait for it.
            classifier.judge([_FIRST])
        self._classifier = classifier
        self._clock = clock
        self._began_s: float | None = None
        # One thread: a second forward pass at the same time would fight for the same cores.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="safety")
        # Applied here and not as a decorator, which would keep one queue for all instances and event loops.
        self._judge_together: Callable[[str], Awaitable[Verdict]] = serve.batch(
            max_batch_size=config.max_batch, batch_wait_timeout_s=config.batch_wait_s
        )(self._judge_batch)

    async def judge(self, texts: Sequence[str]) -> list[Verdict]:
        """Return a verdict on each text, in order; errors as `SafetyPort.judge`."""
        for text in texts:
            self._classifier.check(text)
        return list(await asyncio.gather(*(self._judge_together(text) for text in texts)))

    def trouble(self) -> str | None:
        """Return what is wrong: a forward pass that has been running for over a minute."""
        began_s = self._began_s
        if began_s is None or self._clock() - began_s <= MAX_FORWARD_S:
            return None
        return f"the safety classifier has been at one batch for {self._clock() - began_s:.0f} seconds"

    async def _judge_batch(self, texts: list[str]) -> list[Verdict]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._judge, texts)

    def _judge(self, texts: list[str]) -> list[Verdict]:
        self._began_s = self._clock()
        try:
            return self._classifier.judge(texts)
        finally:
            self._began_s = None


class RemoteSafety:
    """The safety deployment, seen through its handle."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._judge = handle.judge

    async def judge(self, texts: Sequence[str]) -> list[Verdict]:
        """Return a verdict on each text, in order; errors as `SafetyPort.judge`, or Ray's where the actor is gone."""
        try:
            verdicts: list[Verdict] = await self._judge.remote(tuple(texts))
        except RequestError as error:
            raise unwrap(error) from None
        return verdicts


class Safety:
    """The actor: a shell around `LocalSafety`."""

    def __init__(self, config: SafetyConfig) -> None:
        self._safety = LocalSafety(config)

    async def judge(self, texts: tuple[str, ...]) -> list[Verdict]:
        """Return a verdict on each text, in order."""
        return await self._safety.judge(texts)

    async def trouble(self) -> str | None:
        """Return why verdicts do not come, None where they do; asked by gateways."""
        return self._safety.trouble()

    def check_health(self) -> None:
        """Serve's health check.

        Raises:
            EngineError: the classifier hangs.
        """
        trouble = self._safety.trouble()
        if trouble is not None:
            raise EngineError(trouble)
