"""What the routes ask of the gateway: five methods, in plain typed values, and no HTTP.

`deployments.gateway` has them; tests plug in a scripted one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from deployments.generation import GenerationEvent, GenerationRequest, HealthReport, ModelCard, Verdict


class GatewayPort(Protocol):
    """The serving side of the border.

    Errors of every method: `RequestError` (the caller's fault), `OverloadError` (come back later), `TimeoutError` (the
    deadline has passed); anything else is a failure of ours.
    """

    def models(self) -> Sequence[ModelCard]:
        """Return every servable name, bases before their adapters."""
        ...

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield the events of one answer; closing the iterator frees the request.

        Errors raised before the first event become an HTTP status, later ones an event of the stream.
        """
        ...

    async def moderate(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """Return the classifier's verdict on each text, in order."""
        ...

    async def health(self) -> HealthReport:
        """Say whether every base model has a replica that makes progress."""
        ...

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        ...
