"""Compose the HTTP side: routes, middleware and error handlers around a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Match
from starlette.types import Scope

from app.access.tenants import KeyRing
from app.gateway_port import WholeGatewayPort
from app.http.body_threads import BodyThreads
from app.http.errors import ApiError
from app.http.field_errors import invalid_body
from app.http.hosts import HostRule, OriginRule, check_sender
from app.http.json_route import error_response
from app.http.middleware import Border, RequestBody
from app.http.openapi import serve_document
from app.routes import (
    accounts,
    adapters,
    batches,
    chat,
    classify,
    completions,
    embeddings,
    files,
    health,
    messages,
    models,
    moderations,
    page,
    requests,
    rerank,
    responses,
    tokens,
)
from app.routes.context import GUARDS
from app.settings import BatchSettings, LimitSettings

_RESOURCES = (
    chat, completions, responses, messages, embeddings, classify, rerank, models, moderations, tokens, adapters,
    accounts, files, batches, requests, health, page,
)  # fmt: skip
_ROUTES = [route for resource in _RESOURCES for route in resource.router.routes]
_DESCRIPTION = "OpenAI-compatible serving of base models and their LoRA adapters."


def create_app(
    gateway: WholeGatewayPort,
    *,
    limits: LimitSettings | None = None,
    moderation_model: str | None = None,
    admin_key_sha256: str | None = None,
    key_ring: KeyRing | None = None,
    host_rule: HostRule | None = None,
    allowed_origins: Sequence[str] = (),
    batch_settings: BatchSettings | None = None,
    default_timeout_s: float | None = None,
) -> FastAPI:
    """Build the application that answers for `gateway`.

    Args:
        gateway: generates, moderates and reports.
        limits: bounds on one request; None selects the defaults.
        moderation_model: public name of the classifier (`settings.safety.name`); None if there is none.
        admin_key_sha256: digest of the key that admin routes require; None disables them.
        key_ring: maps API keys to tenants; None if no key is required.
        host_rule: host names that the server accepts; None accepts any.
        allowed_origins: origins whose pages may send requests from a browser (CORS); "*" for all. Others may
            send only what changes nothing, unless a key is required.
        batch_settings: bounds on files, and whether responses are kept; None selects the defaults.
        default_timeout_s: deadline of requests without one of their own; None for none.
    """

    @asynccontextmanager
    async def life(_: FastAPI) -> AsyncIterator[None]:
        yield
        await gateway.close()

    app = FastAPI(
        title="Antiphon",
        version="1",
        description=_DESCRIPTION,
        redirect_slashes=False,
        openapi_url=None,
        lifespan=life,
    )
    app.state.gateway, app.state.body_threads = gateway, BodyThreads()
    app.state.limits, app.state.default_timeout_s = limits or LimitSettings(), default_timeout_s
    app.state.moderation_model, app.state.admin_key_sha256 = moderation_model, admin_key_sha256
    app.state.key_ring = key_ring or KeyRing()
    kept = batch_settings or BatchSettings()
    app.state.max_file_bytes, app.state.keeps_responses = kept.max_file_bytes, kept.responses_last_s is not None
    app.state.paths = {route.path for route in _ROUTES}
    for resource in _RESOURCES:
        app.include_router(resource.router)
    serve_document(app)
    app.add_exception_handler(RequestValidationError, _answer_invalid_body)
    app.add_exception_handler(HTTPException, _answer_http_error)
    max_bytes = app.state.limits.max_body_bytes
    app.add_middleware(RequestBody, max_bytes=max_bytes, has_body=_has_body, streamed=[files.UPLOAD])
    origins = OriginRule.of(allowed_origins, is_open=not app.state.key_ring.tenant_by_name)
    app.add_middleware(Border, check=partial(_check, hosts=host_rule or HostRule(), origins=origins))
    if allowed_origins:
        _let_pages_ask(app, allowed_origins)
    return app


async def _check(request: Request, *, hosts: HostRule, origins: OriginRule) -> None:
    """Check where a request comes from, and run the guards of the route that answers it, which runs them again.

    Raises:
        ApiError: as the route raises it, if the key is missing or wrong, or as `check_sender`.
    """
    check_sender(request, hosts, origins)
    route = _route(request.scope)
    for dependency in () if route is None else route.dependant.dependencies:
        if dependency.call in GUARDS:
            await dependency.call(request)


def _route(scope: Scope) -> APIRoute | None:
    """Return the route that answers a request; None for the document's, and if there is none."""
    return next((route for route in _ROUTES if route.matches(scope)[0] is Match.FULL), None)


def _has_body(scope: Scope) -> bool:
    route = _route(scope)
    return route is not None and route.body_field is not None


def _let_pages_ask(app: FastAPI, origins: Sequence[str]) -> None:
    """Add CORS headers outside `Border`: browsers hide an error response that lacks them from the page."""
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST", "DELETE"),
        # Clients send headers of their own; credentials that a browser adds (cookies) do not authenticate anybody.
        allow_headers=("*",),
        expose_headers=("*",),
        allow_private_network=True,
    )


async def _answer_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(invalid_body(error.errors(), error.body), request.scope)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.scope['path'][:128]}"
    if error.status_code == 404:
        # The address of a server that is given to OpenAI's clients without its /v1.
        versioned = "/v1" + request.scope["path"]
        hint = f" Did you mean {versioned}?" if versioned in request.app.state.paths else ""
        api_error = ApiError(404, f"Unknown route: {target}.{hint}", code="unknown_url")
    elif error.status_code == 405:
        allowed = {"Allow": ", ".join(_methods(request.scope))}
        api_error = ApiError(405, f"Method not allowed: {target}.", code="method_not_allowed", headers=allowed)
    else:
        api_error = ApiError(error.status_code, "The request was not understood.")
    api_error.headers = {**(error.headers or {}), **api_error.headers}
    return error_response(api_error, request.scope)


def _methods(scope: Scope) -> list[str]:
    """Return the methods of all routes that match a path; the router reports only those of the first."""
    methods = {name for route in _ROUTES if route.matches(scope)[0] is not Match.NONE for name in route.methods}
    return sorted(methods | ({"HEAD"} if "GET" in methods else set()))
