"""The routes that tell what tenants have used, and that make and revoke keys; all of them need the admin key."""

from __future__ import annotations

import asyncio
import csv
import io
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Annotated, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from pydantic import Field

from app.access.tenants import KeyRing, key_digest
from app.http.errors import ApiError
from app.http.json_route import JsonResponse, JsonRoute, respond
from app.routes.context import ERRORS, OpenContext, only_admin
from app.schemas.wire import WireRequest, WireResponse
from deployments.accounts.values import UsageQuestion, UsageRecord

if TYPE_CHECKING:
    from deployments.accounts.meter import Meter


class UsageInfo(WireResponse):
    """One tenant's usage of one model or adapter; `tenant` is empty if the server has no keys."""

    tenant: str
    model: str
    adapter: str | None = Field(description="Digest of the adapter's content.")
    num_requests: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    device_s: float = Field(description="Device time in seconds; requests share a step's time by tokens.")
    mean_ttft_s: float | None
    mean_tpot_s: float | None


class UsageReport(WireResponse):
    """Totals for the requested period."""

    object: Literal["usage"] = "usage"
    data: list[UsageInfo]


class NewKeyRequest(WireRequest):
    """Ask for a new key for a configured tenant."""

    tenant: str = Field(max_length=128, description="Name of the tenant.")


class ApiKeyInfo(WireResponse):
    """A key created while the server was running."""

    id: str = Field(description="SHA-256 of the key.")
    object: Literal["api_key"] = "api_key"
    tenant: str
    created: int
    key: str | None = Field(default=None, description="The key itself; returned once, on creation.")


class ApiKeyList(WireResponse):
    """Keys created while the server was running, without those of the configuration."""

    object: Literal["list"] = "list"
    data: list[ApiKeyInfo]


class RemovedKey(WireResponse):
    """A revoked key."""

    id: str
    object: Literal["api_key.deleted"] = "api_key.deleted"
    deleted: Literal[True] = True


MAX_RECORDS = 100_000
KEY_PREFIX = "sk-"
LATEST_UNIX_S = float(1 << 53)

Time = Annotated[float, Query(ge=0, le=LATEST_UNIX_S, allow_inf_nan=False, description="Unix seconds.")]

router = APIRouter(route_class=JsonRoute, tags=["accounts"], dependencies=[Depends(only_admin)])


async def _meter(context: OpenContext) -> Meter:
    meter = context.server.meter
    if meter is None:
        raise ApiError(404, "This server does not account for usage: `accounts` is null.", code="accounts_disabled")
    return meter


async def _question(
    since: Time = 0.0,
    until: Time = LATEST_UNIX_S,
    tenant: Annotated[str | None, Query(max_length=128)] = None,
    model: Annotated[str | None, Query(max_length=200)] = None,
) -> UsageQuestion:
    return UsageQuestion(since_unix_s=since, until_unix_s=until, tenant=tenant, model=model)


Counted = Annotated["Meter", Depends(_meter)]
Question = Annotated[UsageQuestion, Depends(_question)]


@router.get("/admin/usage", response_model=UsageReport, responses=ERRORS)
async def usage(meter: Counted, question: Question) -> Response:
    """Return total usage by tenant, model and adapter."""
    totals = [UsageInfo(**asdict(total) | {"adapter": total.adapter or None}) for total in await meter.totals(question)]
    return JsonResponse(UsageReport(data=totals))


@router.get(
    "/admin/usage.csv",
    response_class=Response,
    responses=ERRORS | {200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
)
async def usage_records(meter: Counted, question: Question) -> Response:
    """Return one row per answer: the first 100,000 of the requested period."""
    # All streams of the gateway would wait for it.
    sheet = await asyncio.to_thread(_sheet, await meter.records(question, limit=MAX_RECORDS))
    return Response(sheet, headers={"content-type": "text/csv; charset=utf-8"})


def _sheet(records: Sequence[UsageRecord]) -> str:
    names = [field.name for field in fields(UsageRecord)]
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(names)
    writer.writerows([_cell(getattr(record, name)) for name in names] for record in records)
    return text.getvalue()


def _cell(value: object) -> object:
    """Return what no spreadsheet runs as a formula: a record's id begins with the client's own."""
    if not isinstance(value, str):
        return value
    # Where a comma is a decimal point, a semicolon begins the next cell, and the writer does not quote it.
    value = value.replace(";", "_")
    return f"'{value}" if value.startswith(("=", "+", "-", "@")) else value


@router.get("/admin/keys", response_model=ApiKeyList, responses=ERRORS)
async def list_keys(meter: Counted) -> Response:
    """List the keys created while the server was running; only their SHA-256 is stored."""
    keys = await meter.keys()

    def make() -> ApiKeyList:
        return ApiKeyList(
            data=[ApiKeyInfo(id=key.digest, tenant=key.tenant, created=int(key.created_unix_s)) for key in keys]
        )

    # There may be thousands.
    return await respond(make, is_large=True)


@router.post("/admin/keys", response_model=ApiKeyInfo, responses=ERRORS)
async def make_key(body: NewKeyRequest, meter: Counted, request: Request) -> Response:
    """Create a key for a tenant and return it once; every gateway accepts it within two seconds."""
    ring: KeyRing = request.app.state.key_ring
    if body.tenant not in ring.tenant_by_name:
        raise ApiError(
            404,
            f"The configuration has no tenant '{body.tenant}'.",
            param="tenant",
            code="tenant_not_found",
        )
    key = KEY_PREFIX + secrets.token_urlsafe(32)
    await meter.add_key(key_digest(key), body.tenant)
    return JsonResponse(ApiKeyInfo(id=key_digest(key), tenant=body.tenant, created=int(time.time()), key=key))


@router.delete("/admin/keys/{key_id}", response_model=RemovedKey, responses=ERRORS)
async def revoke_key(meter: Counted, key_id: Annotated[str, Path(max_length=64)]) -> Response:
    """Revoke a key by its SHA-256; after two seconds, no gateway accepts it."""
    if not await meter.remove_key(key_id):
        raise ApiError(404, "There is no such key.", param="key_id", code="key_not_found")
    return JsonResponse(RemovedKey(id=key_id))
