"""API keys and their tenants. Only digests of keys are stored; each belongs to a tenant, and one to the administrator.

A tenant's requests reach the gateway through `TenantGateway`: models that the tenant may not use do not exist for it,
its prefix cache is separate, and the engine gives it one fair share regardless of cache salts.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from starlette.datastructures import Headers

from app.access.limits import over_limit, quota_headers
from app.gateway_port import GatewayPort
from app.http.errors import ApiError
from deployments.accounts.joint_admission import JointAdmission
from deployments.accounts.values import OF_BATCHES, Charge, TenantLimits
from deployments.answer_events import GenerationEvent, Started, TextDelta, Verdict
from deployments.errors import UnavailableError, unknown_model
from deployments.generation import AnyRequest, ChatPrompt, GenerationRequest, ModelCard, TextPrompt
from deployments.pooled import EmbeddingRequest, Embeddings, Reranking, RerankRequest, Tokenized
from deployments.prompt_texts import CHARS_PER_TOKEN, num_chars
from deployments.timeline import Reception, Timeline
from engine.errors import OverloadError, RequestError

if TYPE_CHECKING:
    from deployments.accounts.meter import Meter

ADMIN_KEY_VARIABLE = "ANTIPHON_ADMIN_KEY"
RETRY_AFTER_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A tenant, which owns API keys.

    Attributes:
        models: names of the base models and adapters that it may use, including their versions; None for all.
        priority: added to the priority of each of its requests; lower is served first.
    """

    name: str
    models: frozenset[str] | None = None
    priority: int = 0
    limits: TenantLimits = field(default_factory=TenantLimits)

    def may_use(self, model: str) -> bool:
        """Return whether this tenant may use a model, given by name or `name@version`."""
        return self.models is None or model in self.models or model.partition("@")[0] in self.models


def key_digest(key: str) -> str:
    """Return the stored form of a key: its SHA-256 in lower-case hex."""
    return hashlib.sha256(key.encode()).hexdigest()


def given_key(headers: Headers) -> str | None:
    """Return the API key of a request, from `Authorization: Bearer` (OpenAI) or `x-api-key` (Anthropic)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRing:
    """Maps keys to tenants by their SHA-256; if there are no tenants, no key is required."""

    tenant_by_name: Mapping[str, Tenant] = field(default_factory=dict)
    name_by_digest: Mapping[str, str] = field(default_factory=dict)

    def identify(self, headers: Headers, made_later: Mapping[str, str] | None) -> Tenant:
        """Return the tenant of a request's key; `made_later` maps digests of further keys to tenant names.

        Raises:
            ApiError: 401 if the key is missing or unknown.
            UnavailableError: the key is not one of the configuration's, and further ones are not known yet (None).
        """
        key = given_key(headers)
        # Looking up a digest has no timing that reveals keys.
        digest = "" if key is None else key_digest(key)
        name = self.name_by_digest.get(digest) or (made_later or {}).get(digest, "")
        tenant = self.tenant_by_name.get(name)
        if tenant is None and key is not None and made_later is None:
            raise UnavailableError("The API keys are not known yet.", retry_after_s=RETRY_AFTER_S)
        if tenant is None:
            message = "No API key was given." if key is None else "The API key is wrong."
            raise wrong_key(f"{message} Send one as 'Authorization: Bearer ...' or 'x-api-key'.")
        return tenant

    def named(self, name: str) -> Tenant:
        """Return the tenant on whose behalf the server itself sends a request.

        Raises:
            ApiError: 401 if it is no longer configured.
        """
        if name not in self.tenant_by_name:
            raise wrong_key("The tenant that this was asked for is not known any more.")
        return self.tenant_by_name[name]


def wrong_key(message: str) -> ApiError:
    """Return the 401 for a missing or wrong key."""
    return ApiError(
        401,
        message,
        error_type="authentication_error",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


def is_admin(headers: Headers, admin_key_sha256: str | None) -> bool:
    """Return whether a request has the admin key."""
    key = given_key(headers)
    if key is None or admin_key_sha256 is None:
        return False
    return hmac.compare_digest(key_digest(key), admin_key_sha256)


def check_admin(headers: Headers, admin_key_sha256: str | None) -> None:
    """Require the admin key.

    Raises:
        ApiError: 403 if the server has no admin key; 401 if the request's key is missing or wrong.
    """
    if admin_key_sha256 is None:
        raise ApiError(
            403,
            f"This server has no admin key: set {ADMIN_KEY_VARIABLE} where it is started, or 'admin_key_sha256'.",
            error_type="permission_error",
            code="admin_disabled",
        )
    if not is_admin(headers, admin_key_sha256):
        other = "" if given_key(headers) is None else " which this is not; send it"
        raise wrong_key(f"This route needs the admin key,{other} as 'Authorization: Bearer ...'.")


@dataclass(slots=True)
class _Used:
    """Tokens that one request has used so far, counted against its tenant's limits; None if not known yet."""

    num_input: int | None = None
    num_output: int = 0


class TenantGateway:
    """The gateway as one tenant sees it, for one HTTP request.

    Args:
        meter: counts what the tenant uses; None if usage is not counted.
        headers: receives the response's rate limit headers.
        reception: of the HTTP request.
        is_batch: whether it is a line of a batch, which counts apart from the tenant's other requests.
    """

    def __init__(
        self,
        gateway: GatewayPort,
        meter: Meter | None,
        tenant: Tenant,
        headers: dict[str, str],
        reception: Reception,
        *,
        is_batch: bool = False,
    ) -> None:
        self._gateway = gateway
        self._meter = meter
        self._tenant = tenant
        self._headers = headers
        self._reception = reception
        self._counted_as = tenant.name + (OF_BATCHES if is_batch else "")
        self._joint: JointAdmission | None = None

    def models(self) -> Sequence[ModelCard]:
        """Return the servable names that the tenant may use."""
        return [card for card in self._gateway.models() if self._tenant.may_use(card.name)]

    def model(self, name: str) -> ModelCard | None:
        """Return one servable name that the tenant may use."""
        return self._gateway.model(name) if self._tenant.may_use(name) else None

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """Yield the events of one answer. Answers that are asked for before the first is begun are admitted together.

        Raises:
            RequestError: the model does not exist for the tenant.
            ApiError: 429 if the tenant is over one of its limits; raised when the iterator is first advanced.
        """
        self._check(request.model)
        own = self._own(request)
        meter, limits = self._meter, self._tenant.limits
        if meter is None or not limits.has_any:
            return self._gateway.generate(own)
        if self._joint is None or self._joint.asked is not None:
            self._joint = JointAdmission(self._counted_as, limits)
        size = num_chars(request.prompt)
        self._joint.add(_guess(size))
        return self._metered(own, size, self._joint)

    async def embed(self, request: EmbeddingRequest) -> Embeddings:
        """Return a vector for each input; errors as `generate`. Counts as one request, however many inputs it has."""
        self._check(request.model)
        own = self._own(request)
        async with self._admitted(request.num_chars) as used:
            found = await self._gateway.embed(own)
            used.num_input = found.num_prompt_tokens
            return found

    async def rerank(self, request: RerankRequest) -> Reranking:
        """Return how well documents answer queries; errors as `generate`. Counts as one request."""
        self._check(request.model)
        async with self._admitted(request.num_chars) as used:
            found = await self._gateway.rerank(self._own(request))
            used.num_input = found.num_prompt_tokens
            return found

    async def tokenize(
        self, model: str, prompt: ChatPrompt | TextPrompt, *, with_texts: bool, tenant: str = ""
    ) -> Tokenized:
        """Return the token ids of a prompt to a model. Counts towards no limit, as the same prompt mostly follows.

        Args:
            tenant: ignored; it is this one.
        """
        self._check(model)
        return await self._gateway.tokenize(model, prompt, with_texts=with_texts, tenant=self._tenant.name)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of some token ids of a model."""
        self._check(model)
        return await self._gateway.detokenize(model, token_ids)

    async def moderate(self, texts: Sequence[str], *, tenant: str = "") -> Sequence[Verdict]:
        """Return the classifier's verdict on each text, in order. Counts as one request, however many texts it has.

        Args:
            tenant: ignored; it is this one.

        Raises:
            ApiError: 429 if the tenant is over one of its limits.
        """
        async with self._admitted(sum(map(len, texts))):
            return await self._gateway.moderate(texts, tenant=self._tenant.name)

    async def timelines(self, client_id: str) -> list[Timeline]:
        """Return the timelines of one of the tenant's own requests."""
        found = await self._gateway.timelines(client_id)
        return [timeline for timeline in found if timeline.tenant == self._tenant.name]

    async def _metered(
        self, request: GenerationRequest, size: int, joint: JointAdmission
    ) -> AsyncGenerator[GenerationEvent, None]:
        async with (
            self._admitted(size, joint) as used,
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
    async def _admitted(self, size: int, joint: JointAdmission | None = None) -> AsyncIterator[_Used]:
        """Count a prompt of `size` characters against the tenant's limits, then what the block records as used.

        Args:
            joint: of all the request's answers, if it may have several.

        Raises:
            ApiError: 429 if the tenant is over one of its limits.
        """
        meter, name, limits = self._meter, self._counted_as, self._tenant.limits
        guess = _guess(size)
        used = _Used()
        if meter is None or not limits.has_any:
            yield used
            return
        with self._reception.stage("limits"):
            admission = await meter.begin(joint or JointAdmission(name, limits, guess, num_answers=1))
        self._headers.update(quota_headers(admission.quotas))
        if admission.refused_by is not None:
            raise over_limit(admission, getattr(limits, admission.refused_by))
        admitted_s = time.monotonic()
        try:
            yield used
        except (RequestError, OverloadError):
            if used.num_input is None:
                used.num_input = 0
            raise
        finally:
            num_input = guess if used.num_input is None else used.num_input
            num_left = num_input - (guess if admission.is_counted else 0)
            window = admission.quotas.get("input_tokens_per_minute")
            if window is not None and time.monotonic() - admitted_s > window.resets_in_s:
                # What was counted too much is gone with its window: others would have it in the next for nothing.
                num_left = max(0, num_left)
            meter.release(Charge(name, limits, num_left, used.num_output))

    def _own(self, request: AnyRequest) -> AnyRequest:
        """Return a request with the tenant's name, priority and separate prefix cache."""
        return replace(
            request,
            tenant=self._tenant.name,
            salt=f"{self._tenant.name}\n{request.salt}",
            priority=request.priority + self._tenant.priority,
        )

    def _check(self, model: str) -> None:
        if not self._tenant.may_use(model):
            raise unknown_model(model)


def _guess(num_chars: int) -> int:
    """Estimate the tokens of a prompt; no prompt has none."""
    return num_chars // CHARS_PER_TOKEN + 1
