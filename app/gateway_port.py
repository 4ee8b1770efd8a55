"""The gateway interfaces that routes use: a few methods with plain typed values, and no HTTP.

`deployments.gateway.gateway` implements them, and tests use a scripted one. `app.access.tenants` wraps `GatewayPort`
for one tenant.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Protocol

from deployments.answer_events import GenerationEvent, Verdict
from deployments.generation import ChatPrompt, GenerationRequest, HealthReport, ModelCard, TextPrompt
from deployments.pooled import EmbeddingRequest, Embeddings, Reranking, RerankRequest, Tokenized
from deployments.timeline import Timeline

if TYPE_CHECKING:
    from deployments.accounts.meter import Meter
    from deployments.batches.client import BatchClient
    from deployments.registry.adapter_directory import AdapterDirectory


class GatewayPort(Protocol):
    """What clients ask of the serving side.

    Errors of every method: `RequestError` (the client's fault), `OverloadError` (retry later), `TimeoutError` (the
    deadline has passed); anything else is an internal failure.
    """

    def models(self) -> Sequence[ModelCard]:
        """Return all servable names, base models before their adapters. May be called from any thread."""
        ...

    def model(self, name: str) -> ModelCard | None:
        """Return one servable name, which may be a version of an adapter; None if there is none."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of one answer; closing the iterator cancels the request.

        Errors before the first event become an HTTP status, later ones an event of the stream.
        """
        ...

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector for each input."""
        ...

    async def rerank(self, request: RerankRequest) -> Reranking:
        """Return how well each document answers its query."""
        ...

    async def tokenize(
        self, model: str, prompt: ChatPrompt | TextPrompt, *, with_texts: bool, tenant: str = ""
    ) -> Tokenized:
        """Return the token ids of a prompt to a model, with their texts if requested."""
        ...

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of some token ids of a model."""
        ...

    async def moderate(self, texts: Sequence[str], *, tenant: str = "") -> Sequence[Verdict]:
        """Return the classifier's verdict on each text, in order. Tenants take turns."""
        ...

    async def timelines(self, client_id: str) -> list[Timeline]:
        """Return the timelines of a client's request, one per answer, oldest first; empty if it is unknown."""
        ...


class ServerPort(Protocol):
    """What belongs to the server as a whole, whoever asks. Errors as in `GatewayPort`."""

    @property
    def meter(self) -> Meter | None:
        """Counts the usage of tenants; None if it is not counted."""
        ...

    @property
    def batches(self) -> BatchClient | None:
        """Files and batches; callers pass the tenant to its methods. None if they are disabled."""
        ...

    @property
    def adapters(self) -> AdapterDirectory:
        """The names of adapters, and changes to them."""
        ...

    async def health(self) -> HealthReport:
        """Return whether every base model has a replica that makes progress."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        ...


class WholeGatewayPort(GatewayPort, ServerPort, Protocol):
    """The gateway as the application holds it, which may close it; routes may not."""

    async def close(self) -> None:
        """Flush usage records and traces of finished answers."""
        ...
