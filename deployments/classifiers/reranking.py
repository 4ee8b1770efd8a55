"""The deployment of a cross-encoder, and a gateway's client for all of them.

Pairs that arrive together, from any requests, share a forward pass, which runs in a thread. A gateway asks each about a
bounded number of requests at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ray.serve.handle import DeploymentHandle

from deployments.actor_process import begin_actor, settle
from deployments.batched_model import BatchedModel, limited
from deployments.classifiers.sequence_window import CHARS_PER_TOKEN
from deployments.config import RerankerConfig
from deployments.generation import ModelCard
from deployments.handle_calls import reached, until_answered
from deployments.pooled import Pair, PairScore, Reranking, RerankRequest
from deployments.room import Room
from engine.errors import OverloadError, RequestError

if TYPE_CHECKING:
    from deployments.classifiers.cross_encoder import CrossEncoder


class Reranker(BatchedModel[Pair, PairScore | RequestError]):
    """The actor of one cross-encoder; the deployment is named `Reranker-<name>`."""

    def __init__(self, config: RerankerConfig, encoder: CrossEncoder | None = None) -> None:
        begin_actor()
        if encoder is None:
            # Imports torch, which a gateway does not need.
            from deployments.classifiers.cross_encoder import CrossEncoder

            encoder = CrossEncoder(config)
            # Warm-up: the first pass is many times slower, and no request should wait for it.
            encoder.score([Pair("The first pair", "that it scores.", "", config.max_tokens)])
        super().__init__(
            encoder.score,
            "reranker",
            max_batch=config.max_batch,
            # What is cut off costs nothing.
            num_chars=lambda pair: min(pair.num_chars, CHARS_PER_TOKEN * config.max_tokens),
            max_wait_s=config.timeout_s,
        )
        settle()

    async def score(self, pairs: Sequence[Pair]) -> list[PairScore] | OverloadError:
        """Return the score of each pair, in order; an overload is returned, as by `Safety.judge`.

        Raises:
            RequestError: a pair cannot be scored.
        """
        try:
            results = await self.results(pairs)
        except OverloadError as error:
            return error
        found = []
        for result in results:
            if isinstance(result, RequestError):
                raise result
            found.append(result)
        return found


class Rerankers:
    """All configured cross-encoders, called through their handles."""

    def __init__(self, configs: Sequence[RerankerConfig], handles: Mapping[str, DeploymentHandle]) -> None:
        self._config_by_name = {config.name: config for config in configs}
        self._handles = handles
        self._room_by_name = {name: Room() for name in handles}

    @property
    def parts(self) -> dict[str, DeploymentHandle]:
        """Their handles by the names that `/health` uses."""
        return {f"reranker {name}": handle for name, handle in self._handles.items()}

    def cards(self, created_s: int) -> list[ModelCard]:
        """Return their entries for `/v1/models`."""
        return [
            ModelCard(name=name, parent=None, created_s=created_s, max_model_len=config.max_tokens, task="score")
            for name, config in self._config_by_name.items()
        ]

    def check(self, name: str) -> None:
        """Check that a cross-encoder exists.

        Raises:
            RequestError: there is no cross-encoder of this name.
        """
        if name not in self._config_by_name:
            words = f"The reranker '{name[:128]}' does not exist." if self._handles else "This server has no reranker."
            raise RequestError(words, field="model", code="model_not_found")

    async def score(self, request: RerankRequest) -> Reranking:
        """Return the score of each pair. The time limit holds for a place, and again once the request has it.

        Raises:
            RequestError: a pair cannot be scored.
            OverloadError: the model cannot be reached, does not answer in time, or is overloaded.
            TimeoutError: the client's deadline has passed.
        """
        config = self._config_by_name[request.model]
        max_tokens = config.max_tokens if request.truncates_to == -1 else request.truncates_to
        pairs = tuple(pair._replace(max_tokens=max_tokens) for pair in request.pairs)
        room, sizes = self._room_by_name[request.model], [pair.num_chars for pair in pairs]
        limit = limited("The reranker gave no scores", config.timeout_s, sizes, config.max_batch)
        async with asyncio.timeout(request.timeout_s):
            with limit as limit_s:
                async with room.timed_place(request.tenant or request.salt, limit_s, max_wait_s=limit_s):
                    found = await reached("reranker", _scored, self._handles[request.model], pairs)
        return Reranking(
            scores=tuple(entry.score for entry in found), num_prompt_tokens=sum(entry.num_tokens for entry in found)
        )


async def _scored(handle: DeploymentHandle, pairs: Sequence[Pair]) -> list[PairScore]:
    # Cancel the call with its caller: it may hold a thousand pairs.
    found: list[PairScore] | OverloadError = await until_answered(handle.score.remote(pairs))
    if isinstance(found, OverloadError):
        raise found
    return found
