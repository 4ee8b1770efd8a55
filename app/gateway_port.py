"""What the routes ask of the gateway: a few methods, in plain typed values, and no HTTP.

`deployments.gateway.gateway` has them; tests plug in a scripted one.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from adapters.catalogue import AdapterEntry
from deployments.accounts.values import (
    Admission,
    Charge,
    KeyInfo,
    TenantLimits,
    UsageQuestion,
    UsageRecord,
    UsageTotal,
)
from deployments.batches.values import Batch, NewBatch, NewFile, Page, PageQuestion, StoredFile
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
from deployments.registry.adapter_changes import AdapterStatus, Registration
from deployments.timeline import Timeline


class AdapterPort(Protocol):
    """The names of adapters. Errors of its methods: `RequestError`, `OverloadError`."""

    async def load(self, wanted: Registration) -> AdapterEntry:
        """Make a folder's content the newest version of a name."""
        ...

    async def load_if(self, wanted: Registration, trial: Callable[[str], Awaitable[None]]) -> AdapterEntry:
        """Load without traffic, try by the name that the trial is given, and only then let the name stand for it."""
        ...

    async def unload(self, name: str, number: int | None = None) -> list[int]:
        """Forget a name or a version, wait for the requests that use it; return the bytes freed on each replica."""
        ...

    async def route(self, name: str, split: Mapping[int, int]) -> AdapterEntry:
        """Split a name's traffic among its versions, by percentages."""
        ...

    async def status(self) -> list[AdapterStatus]:
        """Return all names, and where their contents lie."""
        ...


class MeterPort(Protocol):
    """Counts what tenants use."""

    @property
    def tenant_by_key(self) -> Mapping[str, str]:
        """Whose the keys are that were made while the server runs, by their SHA-256."""
        ...

    async def totals(self, question: UsageQuestion) -> list[UsageTotal]:
        """Add up records by tenant, model and adapter."""
        ...

    async def records(self, question: UsageQuestion, *, limit: int) -> list[UsageRecord]:
        """Return records in the order in which they started."""
        ...

    async def keys(self) -> list[KeyInfo]:
        """Return the keys that were made while the server runs."""
        ...

    async def add_key(self, digest: str, tenant: str) -> None:
        """Let a key be a tenant's."""
        ...

    async def remove_key(self, digest: str) -> bool:
        """Forget a key; return whether it was known."""
        ...

    async def admit(self, tenant: str, limits: TenantLimits, input_tokens: int) -> Admission:
        """Count an answer that is about to begin, or say what it is over."""
        ...

    def release(self, charge: Charge) -> None:
        """Count an admitted answer as ended, and what it has used besides what was counted before."""
        ...


class BatchPort(Protocol):
    """Files and batches of tenants. Errors of its methods: `RequestError`, `OverloadError`."""

    async def add_file(self, new: NewFile, content: AsyncIterator[bytes]) -> StoredFile:
        """Keep a content, which comes in parts, as a tenant's file."""
        ...

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file of a tenant."""
        ...

    async def list_files(self, tenant: str, question: PageQuestion) -> Page[StoredFile]:
        """Return a page of a tenant's files."""
        ...

    def content(self, tenant: str, file_id: str) -> AsyncGenerator[bytes, None]:
        """Yield a file's content in parts."""
        ...

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file of a tenant."""
        ...

    async def create(self, new: NewBatch) -> Batch:
        """Keep a batch, and begin to run it."""
        ...

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch of a tenant as it stands."""
        ...

    async def list_batches(self, tenant: str, question: PageQuestion) -> Page[Batch]:
        """Return a page of a tenant's batches as they stand."""
        ...

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """Give up a batch; what was answered stays in its output file."""
        ...


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
    def meter(self) -> MeterPort | None:
        """What counts what tenants use; None where nothing does."""
        ...

    @property
    def batches(self) -> BatchPort | None:
        """Files and batches; None where there are none."""
        ...

    @property
    def adapters(self) -> AdapterPort:
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
