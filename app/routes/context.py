"""What a route knows besides its body: the gateway, the limits, and the request's names."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request
from pydantic import Field

from app.access.limits import check_fits
from app.access.tenants import KeyRing, TenantGateway, check_admin, is_admin
from app.gateway_port import GatewayPort, ServerPort
from app.http.body_threads import BodyThreads
from app.http.errors import ApiError
from app.http.field_names import FieldName
from app.http.json_route import IS_LARGE, TENANT, reception_of
from app.http.sse import EventStream, StreamFrames
from app.schemas.chat import ChatCompletionRequest
from app.schemas.wire import WireResponse
from app.settings import LimitSettings
from app.translation.prompts import chat_prompt
from app.translation.render import ResponseHead
from app.translation.streaming import EventBatches
from deployments.accounts.values import TenantLimits
from deployments.answer_events import GenerationEvent
from deployments.gateway.inside import BATCH_PRIORITY, INSIDE, MAX_TIMEOUT_S, MIN_TIMEOUT_S, TIMEOUT_HEADER
from deployments.generation import AnyRequest, GenerationRequest
from deployments.timeline import Reception

T = TypeVar("T")

MAX_TRACE_PARENT_CHARS = 128


class ErrorDetail(WireResponse):
    """What went wrong and in which field."""

    message: str = Field(description="One sentence that names the field and the bound.")
    type: str = Field(description="`invalid_request_error`, `not_found_error`, `server_error`, ...")
    param: str | None = Field(description="The offending field, such as `messages[0].content`.")
    code: str | None = Field(description="Machine-readable reason, such as `context_length_exceeded`.")


class ErrorResponse(WireResponse):
    """The body of every response with a status of 400 or above."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorResponse, "description": "The request is invalid; `param` names the field."},
    401: {"model": ErrorResponse, "description": "The request lacks the key that the route requires."},
    403: {"model": ErrorResponse, "description": "The route is disabled on this server."},
    404: {"model": ErrorResponse, "description": "The model or route does not exist."},
    413: {"model": ErrorResponse, "description": "The body exceeds the size limit."},
    415: {"model": ErrorResponse, "description": "The body is not JSON."},
    429: {
        "model": ErrorResponse,
        "description": "The tenant has reached a limit; see `Retry-After`.",
    },
    500: {"model": ErrorResponse, "description": "The server failed; retry, or report the `x-request-id`."},
    503: {"model": ErrorResponse, "description": "No capacity now; retry after `Retry-After` seconds."},
    504: {"model": ErrorResponse, "description": "The deadline has passed."},
    "default": {"model": ErrorResponse, "description": "Any other error."},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteContext:
    """The surroundings of one request.

    Attributes:
        gateway: what answers; for a tenant, only what it may use.
        server: the same gateway as what belongs to the whole server.
        moderation_model: public name of the classifier, None where there is none.
        request_id: as answered in `x-request-id`; a client may repeat one.
        timeout_s: how long the client waits for the whole answer; None for as long as it takes.
        trace_parent: as in W3C's Trace Context; what is none is ignored, as it says.
        priority: added to that of each answer, where the server itself asks.
        threads: translate large bodies.
        reception: when the request arrived, and what has happened to it since.
        is_large: to translate the body takes up to seconds, in which the event loop should serve others.
        tenant: who asks; empty where no keys are known.
        tenant_limits: what it may use.
    """

    gateway: GatewayPort
    server: ServerPort
    limits: LimitSettings
    moderation_model: str | None
    request_id: str
    timeout_s: float | None
    trace_parent: str
    priority: int
    threads: BodyThreads
    reception: Reception
    is_large: bool
    tenant: str = ""
    tenant_limits: TenantLimits = field(default_factory=TenantLimits)

    async def aside(self, translate: Callable[[], T], *, is_slow: bool = False) -> T:
        """Return a translation of the body, made on another thread if the body is large or the translation slow.

        Tenants take turns on these threads.
        """
        if not (self.is_large or is_slow):
            return translate()
        # What is slow takes far less time than what is large, and does not wait for it.
        return await self.threads.run(self.tenant if self.is_large else (self.tenant, "small"), translate)

    def placed(self, request: AnyRequest) -> AnyRequest:
        """Return a request with the client's deadline and trace, ranked behind all others if the server itself asks."""
        return replace(
            request,
            timeout_s=self.timeout_s,
            trace_parent=self.trace_parent,
            priority=request.priority + self.priority,
            reception=self.reception,
        )

    async def stream(
        self,
        answers: Sequence[AsyncGenerator[GenerationEvent, None]],
        frames: StreamFrames,
        at_end: Callable[[], Awaitable[None]] | None = None,
        *,
        names: Mapping[str, FieldName] | None = None,
    ) -> EventStream:
        """Return a stream of the answers, which the client's deadline ends, too.

        Args:
            at_end: as of `EventBatches`.
            names: as of `EventStream`.
        """
        events = await EventBatches(answers, at_end, timeout_s=self.timeout_s).open()
        return EventStream(events, frames, request_id=self.request_id, names=names)

    def generate(
        self, generations: Sequence[GenerationRequest], *, made_many_by: str = "n"
    ) -> list[AsyncGenerator[GenerationEvent, None]]:
        """Return the events of each answer, until the client's deadline.

        Args:
            made_many_by: the field that says how many.

        Raises:
            RequestError: the tenant's limits never let so many through.
        """
        check_fits(len(generations), self.tenant_limits, field=made_many_by)
        return [self.gateway.generate(self.placed(generation)) for generation in generations]

    async def num_tokens(self, chat: ChatCompletionRequest) -> int:
        """Return how many tokens the prompt of a chat has."""
        prompt = await self.aside(partial(chat_prompt, chat, self.limits))
        return len((await self.gateway.tokenize(chat.model, prompt, with_texts=False)).token_ids)

    @staticmethod
    def unix_s() -> int:
        """Return the time as answers tell it."""
        return int(time.time())

    def head(self, prefix: str, model: str) -> ResponseHead:
        """Return a new response id, the time, and the model's name."""
        return ResponseHead(response_id=f"{prefix}{uuid.uuid4().hex}", created_s=self.unix_s(), model=model)

    def generation_id(self, head: ResponseHead) -> str:
        """Return a unique id that can be found by the client's: a client may send the same one twice."""
        return f"{self.request_id}.{head.response_id[-32:][:12]}"


async def only_admin(request: Request) -> None:
    """Let nobody through but whoever brings the admin key."""
    check_admin(request.headers, request.app.state.admin_key_sha256)


async def _context(request: Request) -> RouteContext:  # a dependency that is no coroutine costs a thread hop
    context = await _open_context(request)
    ring: KeyRing = request.app.state.key_ring
    if not ring.tenant_by_name:
        return context
    insider, meter = _insider(request), context.server.meter
    with context.reception.stage("auth"):
        if insider is None:
            tenant = ring.identify(request.headers, {} if meter is None else meter.tenant_by_key)
        else:
            tenant = ring.named(insider)
    setattr(request.state, TENANT, tenant.name)
    headers, is_batch = request.state.response_headers, insider is not None
    gateway = TenantGateway(context.gateway, meter, tenant, headers, context.reception, is_batch=is_batch)
    return replace(context, gateway=gateway, tenant=tenant.name, tenant_limits=tenant.limits)


def _insider(request: Request) -> str | None:
    """Return for whom the server itself asks; None for a request that came by HTTP."""
    found: str | None = getattr(request.state, INSIDE, None)
    return found


async def _reader_context(request: Request) -> RouteContext:
    if is_admin(request.headers, request.app.state.admin_key_sha256):
        return await _open_context(request)
    return await _context(request)


async def _open_context(request: Request) -> RouteContext:
    state = request.app.state
    return RouteContext(
        gateway=state.gateway,
        server=state.gateway,
        limits=state.limits,
        moderation_model=state.moderation_model,
        request_id=request.state.request_id,
        timeout_s=_timeout_s(request.headers.get(TIMEOUT_HEADER), state.default_timeout_s),
        trace_parent=request.headers.get("traceparent", "")[:MAX_TRACE_PARENT_CHARS],
        priority=0 if _insider(request) is None else BATCH_PRIORITY,
        threads=state.body_threads,
        reception=reception_of(request.scope),
        is_large=getattr(request.state, IS_LARGE, False),
    )


def _timeout_s(given: str | None, default: float | None) -> float | None:
    if given is None:
        return default
    try:
        seconds = float(given)
    except ValueError:
        seconds = 0.0
    # Not a number is not in between.
    if not MIN_TIMEOUT_S <= seconds <= MAX_TIMEOUT_S:
        raise ApiError(
            400,
            f"'{TIMEOUT_HEADER}' must be a number of seconds from {MIN_TIMEOUT_S:g} to {MAX_TIMEOUT_S:g}.",
            param=TIMEOUT_HEADER,
            code="invalid_value",
        )
    return seconds


Context = Annotated[RouteContext, Depends(_context)]
"""Of a tenant, where keys are known."""
ReaderContext = Annotated[RouteContext, Depends(_reader_context)]
"""Of a tenant, who sees its own, or of whoever brings the admin key, who sees everything."""
OpenContext = Annotated[RouteContext, Depends(_open_context)]
"""Of whoever asks: routes for operators, and those that guard themselves."""
GUARDS = frozenset({only_admin, _context, _reader_context})
"""The dependencies that check a key; they change nothing but note whose it is, and may run twice for one request."""
