"""API keys and whose they are. Only digests of keys are kept; each belongs to a tenant, one to whoever runs the server.

A tenant's requests reach the gateway through `TenantGateway`: models that it may not use do not exist for it, its
prefix cache is its own, and the engine gives it one share however its requests are salted.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

from starlette.datastructures import Headers

from app.access.limits import CHARS_PER_TOKEN, over_limit, quota_headers
from app.gateway_port import GatewayPort
from app.http.errors import ApiError
from deployments.accounts.values import Charge, TenantLimits
from deployments.errors import unknown_model
from deployments.generation import (
    ChatPrompt,
    GenerationEvent,
    GenerationRequest,
    HealthReport,
    ModelCard,
    Started,
    TextDelta,
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

ADMIN_KEY_VARIABLE = "ANTIPHON_ADMIN_KEY"

Computed = TypeVar("Computed", GenerationRequest, EmbeddingRequest)
"""What an engine is asked for."""


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
    limits: TenantLimits = field(default_factory=TenantLimits)

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """Whose each key is, by its SHA-256; without a tenant no key is needed."""

    tenant_by_name: Mapping[str, Tenant] = field(default_factory=dict)
    name_by_digest: Mapping[str, str] = field(default_factory=dict)

    def identify(self, headers: Headers, made_later: Mapping[str, str]) -> Tenant:
        """Return whose key a request brings; `made_later` are names by the digests of further keys.

        Raises:
            ApiError: 401 where it brings none, or one that nobody has.
        """
        key = given_key(headers)
        # A look-up by digest: how long it takes tells nothing of the keys.
        digest = "" if key is None else key_digest(key)
        name = self.name_by_digest.get(digest) or made_later.get(digest, "")
        tenant = self.tenant_by_name.get(name)
        if tenant is None:
            message = "No API key was given." if key is None else "The API key is wrong."
            raise wrong_key(f"{message} Send one as 'Authorization: Bearer ...' or 'x-api-key'.")
        return tenant

    def named(self, name: str) -> Tenant:
        """Return the tenant for whom the server itself asks.

        Raises:
            ApiError: 401 where the configuration has it no more.
        """
        if name not in self.tenant_by_name:
            raise wrong_key("The tenant that this was asked for is not known any more.")
        return self.tenant_by_name[name]


def wrong_key(message: str) -> ApiError:
    """Return the 401 of a request that does not bring the key that it needs."""
    return ApiError(
        401,
        message,
        error_type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def is_admin(headers: Headers, admin_key_sha256: str | None) -> bool:
    """Whether a request brings the admin key."""
    key = given_key(headers)
    if key is None or admin_key_sha256 is None:
        return False
    return hmac.compare_digest(key_digest(key), admin_key_sha256)


def check_admin(headers: Headers, admin_key_sha256: str | None) -> None:
    """Do nothing where a request brings the admin key, as `Authorization: Bearer ...`.

    Raises:
        ApiError: 403 where this server has none, 401 where the request brings none, or another one.
    """
    if admin_key_sha256 is None:
        raise ApiError(
            403,
            f"This server has no admin key: set {ADMIN_KEY_VARIABLE} where it is started, or 'admin_key_sha256'.",
            error_type="permission_error",
            code="admin_disabled",
        )
    if not is_admin(headers, admin_key_sha256):
        raise wrong_key("This route needs the admin key, as 'Authorization: Bearer ...'.")


@dataclass(slots=True)
class _Used:
    """Tokens that one request has used so far, as its tenant's limits count them."""

    num_input: int
    num_output: int = 0


class TenantGateway:
    """A gateway as one tenant sees it, in one HTTP request.

    Args:
        headers: takes what the response tells of the tenant's limits.
    """

    def __init__(self, gateway: GatewayPort, tenant: Tenant, headers: dict[str, str] | None = None) -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._headers = {} if headers is None else headers

    @property
    def meter(self) -> Meter | None:
        """What counts what tenants use."""
        return self._gateway.meter

    @property
    def batches(self) -> BatchClient | None:
        """Files and batches; their methods are told the tenant."""
        return self._gateway.batches

    @property
    def adapters(self) -> AdapterDirectory:
        """The names of adapters; its routes ask for another key."""
        return self._gateway.adapters

    def models(self) -> Sequence[ModelCard]:
        """Return the servable names that the tenant may use."""
        return [card for card in self._gateway.models() if self._tenant.may_use(card.name)]

    def model(self, name: str) -> ModelCard | None:
        """Return one servable name that the tenant may use."""
        return self._gateway.model(name) if self._tenant.may_use(name) else None

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of one answer.

        Raises:
            RequestError: the model does not exist for the tenant.
            ApiError: 429 where the tenant is over one of its limits; as the iterator is first asked.
        """
        self._check(request.model)
        own = self._own(request)
        meter = self._gateway.meter if self._tenant.limits.has_any else None
        return self._gateway.generate(own) if meter is None else self._metered(own, meter)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector of each input; errors as `generate`. A request is one answer, whatever it has of inputs."""
        self._check(request.model)
        own = self._own(request)
        async with self._admitted(self._gateway.meter, request.num_chars) as used:
            found = await self._gateway.embed(own)
            used.num_input = found.num_prompt_tokens
            return found

    async def rerank(self, request: RerankRequest) -> Reranking:
        """Return how well documents answer queries; errors as `generate`. A request is one answer."""
        self._check(request.model)
        async with self._admitted(self._gateway.meter, request.num_chars) as used:
            found = await self._gateway.rerank(replace(request, tenant=self._tenant.name))
            used.num_input = found.num_prompt_tokens
            return found

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

    async def _metered(self, request: GenerationRequest, meter: Meter) -> AsyncGenerator[GenerationEvent, None]:
        async with (
            self._admitted(meter, request.num_chars) as used,
            aclosing(self._gateway.generate(request)) as events,
        ):
            async for event in events:
                if isinstance(event, Started):
                    used.num_input = event.num_prompt_tokens
                elif isinstance(event, TextDelta):
                    used.num_output = event.num_tokens
                else:
                    used.num_output = event.num_completion_tokens
                yield event

    @asynccontextmanager
    async def _admitted(self, meter: Meter | None, num_chars: int) -> AsyncIterator[_Used]:
        """Count a request of so many characters against the tenant's limits, and what the block says that it used.

        Raises:
            ApiError: 429 where the tenant is over one of its limits.
        """
        name, limits = self._tenant.name, self._tenant.limits
        guess = num_chars // CHARS_PER_TOKEN + 1
        used = _Used(guess)
        if meter is None or not limits.has_any:
            yield used
            return
        admission = await meter.admit(name, limits, guess)
        self._headers.update(quota_headers(admission.quotas))
        if admission.refused_by is not None:
            raise over_limit(admission, getattr(limits, admission.refused_by))
        try:
            yield used
        finally:
            meter.release(Charge(name, limits, max(0, used.num_input - guess), used.num_output))

    def _own(self, request: Computed) -> Computed:
        """Return a request as the tenant's: its name, a cache of its own, its priority."""
        return replace(
            request,
            tenant=self._tenant.name,
            salt=f"{self._tenant.name}\n{request.salt}",
            priority=request.priority + self._tenant.priority,
        )

    def _check(self, model: str) -> None:
        if not self._tenant.may_use(model):
            raise unknown_model(model)
