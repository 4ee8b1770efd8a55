"""API keys and whose they are. Only digests of keys are kept; each belongs to a tenant.

A tenant's requests reach the gateway through `TenantGateway`: models that it may not use do not exist for it, its
prefix cache is its own, and the engine gives it one share however its requests are salted.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace

from starlette.datastructures import Headers

from app.errors import ApiError
from app.gateway_port import AdapterPort, GatewayPort
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
from deployments.timeline import Timeline
from engine.errors import RequestError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """Who asks.

    Attributes:
        models: names of base models and adapters that it may use, versions of them included; None for all.
        priority: added to that of each of its requests; lower is served first.
    """

    name: str
    models: frozenset[str] | None = None
    priority: int = 0

    def may_use(self, model: str) -> bool:
        """Whether a name, or a version of one, is for this tenant."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


def key_digest(key: str) -> str:
    """Return what is kept of a key: its SHA-256, in lower-case hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def given_key(headers: Headers) -> str | None:
    """Return the key that a request brings: OpenAI's way (`Authorization: Bearer`) or Anthropic's (`x-api-key`)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


def identify(headers: Headers, tenant_by_digest: Mapping[str, Tenant]) -> Tenant:
    """Return whose key a request brings.

    Raises:
        ApiError: 401 where it brings none, or one that nobody has.
    """
    key = given_key(headers)
    # A look-up by digest: how long it takes tells nothing of the keys.
    tenant = None if key is None else tenant_by_digest.get(key_digest(key))
    if tenant is None:
        message = "No API key was given." if key is None else "The API key is wrong."
        raise ApiError(
            401,
            f"{message} Send one as 'Authorization: Bearer ...' or 'x-api-key'.",
            error_type="authentication_error",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
    return tenant


class TenantGateway:
    """A gateway as one tenant sees it."""

    def __init__(self, gateway: GatewayPort, tenant: Tenant) -> None:
        self._gateway = gateway
        self._tenant = tenant

    @property
    def adapters(self) -> AdapterPort:
        """The names of adapters; its routes ask for another key."""
        return self._gateway.adapters

    def models(self) -> Sequence[ModelCard]:
        """Return the servable names that the tenant may use."""
        return [card for card in self._gateway.models() if self._tenant.may_use(card.name)]

    def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationEvent]:
        """Yield the events of one answer.

        Raises:
            RequestError: the model does not exist for the tenant.
        """
        self._check(request.model)
        own = replace(
            request,
            tenant=self._tenant.name,
            salt=f"{self._tenant.name}\n{request.salt}",
            priority=request.priority + self._tenant.priority,
        )
        return self._gateway.generate(own)

    async def tokenize(self, model: str, prompt: ChatPrompt | TextPrompt, *, with_texts: bool) -> Tokenized:
        """Return what token ids a prompt to a model becomes."""
        self._check(model)
        return await self._gateway.tokenize(model, prompt, with_texts=with_texts)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of some token ids of a model."""
        self._check(model)
        return await self._gateway.detokenize(model, token_ids)

    async def moderate(self, texts: Sequence[str]) -> Sequence[Verdict]:
        """Return the classifier's verdict on each text, in order."""
        return await self._gateway.moderate(texts)

    async def timelines(self, client_id: str) -> list[Timeline]:
        """Return what happened to the answers of a request of the tenant's own."""
        found = await self._gateway.timelines(client_id)
        return [timeline for timeline in found if timeline.tenant == self._tenant.name]

    async def health(self) -> HealthReport:
        """Say whether every base model has a replica that makes progress."""
        return await self._gateway.health()

    async def metrics(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return await self._gateway.metrics()

    def _check(self, model: str) -> None:
        if not self._tenant.may_use(model):
            raise RequestError(f"The model '{model[:128]}' does not exist.", field="model", code="model_not_found")
