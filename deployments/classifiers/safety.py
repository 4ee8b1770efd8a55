"""The safety classifier: a separate actor, or an object in the gateway's process.

Texts that arrive together, from any requests, share a forward pass, which runs in a thread. A long text is judged in
pieces, between which others take their turns: running answers wait for their verdicts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from ray.serve.handle import DeploymentHandle

from deployments.actor_process import begin_actor, settle
from deployments.answer_events import Verdict, worst
from deployments.batched_model import BatchedModel
from deployments.config import SafetyConfig
from deployments.handle_calls import until_answered
from engine.errors import OverloadError

if TYPE_CHECKING:
    from deployments.classifiers.classifier import Classifier

_FIRST = "The first text that a classifier judges."


class Safety(BatchedModel[str, Verdict]):
    """A classifier that serves one event loop; also the deployment `Safety`.

    Loads the classifier unless one is given. Errors as in `Classifier`.
    """

    def __init__(
        self,
        config: SafetyConfig,
        classifier: Classifier | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        begin_actor()
        if classifier is None:
            # Imports torch, which a gateway that only requests verdicts does not need.
            from deployments.classifiers.classifier import Classifier

            classifier = Classifier(config)
            # Warm-up: the first pass is many times slower, and no request should wait for it.
            classifier.judge([_FIRST])
        self._classifier = classifier
        super().__init__(
            classifier.judge,
            "safety classifier",
            max_batch=config.max_batch,
            num_chars=len,
            max_wait_s=config.timeout_s,
            clock=clock,
        )
        settle()

    async def judge(self, texts: Sequence[str], is_urgent: bool = False) -> list[Verdict] | OverloadError:
        """Return a verdict on each text, in order; urgent ones first. Errors as in `Classifier.check`.

        They call the texts `input`, or `input[0]`, `input[1]`, ... if there are several. An overload is returned, not
        raised: Serve logs the traceback of every error, and under overload these would be hundreds a second.
        """
        for index, text in enumerate(texts):
            self._classifier.check(text, field="input" if len(texts) == 1 else f"input[{index}]")
        pieces_by_text = [self._classifier.pieces(text) for text in texts]
        try:
            found = iter(await self.results(list(chain.from_iterable(pieces_by_text)), is_urgent=is_urgent))
        except OverloadError as error:
            return error
        merged = (worst(list(islice(found, len(pieces)))) for pieces in pieces_by_text)
        return [verdict for verdict in merged if verdict is not None]


async def ask_safety(handle: DeploymentHandle, texts: Sequence[str], is_urgent: bool) -> list[Verdict] | OverloadError:
    """Return the deployment's verdict on each text, in order, or its refusal.

    Cancelling withdraws the texts: a classifier that judged what nobody waits for any more would never catch up.
    """
    verdicts: list[Verdict] | OverloadError = await until_answered(handle.judge.remote(texts, is_urgent))
    return verdicts
