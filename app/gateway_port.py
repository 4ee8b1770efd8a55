"""What the routes ask of the gateway: a few methods, in plain typed values, and no HTTP.

`deployments.gateway.gateway` has them, and `app.access.tenants` as one tenant sees them; tests plug in a scripted one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from deployments.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationRequest,
    HealthReport,
    ModelCard,
    TextPrompt,
    Tokenized,
    Verdict,
)
from deployments.pooled import EmbeddingRequest, Embeddings, Reranking, RerankRequest
from deployments.timeline import Timeline

if TYPE_CHECKING:
    from deployments.accounts.meter import Meter
    from deployments.batches.client import BatchClient
    from deployments.registry.adapter_directory import AdapterDirectory


class GatewayPort(Protocol):
    """The serving side of the border.

    Errors of every method: `RequestError` (the caller's fault), `OverloadError` (come back later), `TimeoutError` (the
    deadline has passed); anything else is a failure of ours.
    """

    def models(self) -> Sequence[ModelCard]:
        """Return every servable name, bases before their adapters."""
        ...

    def model(self, name: str) -> ModelCard | None:
        """Return one servable name, which may be a version of an adapter; None where there is none."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of one answer; closing the iterator frees the request.

        Errors raised before the first event become an HTTP status, later ones an event of the stream.
        """
        ...

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector of each input."""
        ...

    async def rerank(self, request: RerankRequest) -> Reranking:
        """Return how well each document answers its query."""
        ...

    async def tokenize(self, model: str, prompt: ChatPrompt | TextPrompt, *, with_texts: bool) -> Tokenized:
        """Return what token ids a prompt to a model becomes, with their texts where these are wanted."""
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of some token ids of a model."""
        ...

    @property
    def meter(self) -> Meter | None:
        """What counts what tenants use; None where nothing does."""
        ...

    @property
    def batches(self) -> BatchClient | None:
        """Files and batches; None where there are none."""
        ...

    @property
    def adapters(self) -> AdapterDirectory:
        """The names of adapters, and how they are changed."""
        ...

    async def moderate(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """Return the classifier's verdict on each text, in order."""
        ...

    async def timelines(self, client_id: str) -> list[Timeline]:
        """Return what happened to the answers of a client's request, oldest first; none if it is not known."""
        ...

    async def health(self) -> HealthReport:
        """Say whether every base model has a replica that makes progress."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        ...


class ClosingGatewayPort(GatewayPort, Protocol):
    """The gateway as the application holds it, which ends with it; no route may."""

    async def close(self) -> None:
        """Give away what is kept of answers that have ended."""
        ...
