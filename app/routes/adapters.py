"""The routes that load, unload, list and route adapters; all of them need the admin key."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Depends, Response

from adapters.catalogue import AdapterVersion
from app.canary import ask
from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, OpenContext, only_admin
from app.schemas.adapters import (
    AdapterInfo,
    AdapterList,
    AdapterVersionInfo,
    LoadAdapterRequest,
    RouteAdapterRequest,
    UnloadAdapterRequest,
    UnloadedAdapter,
    VersionState,
)
from deployments.registry.adapter_changes import AdapterStatus, Registration

router = APIRouter(route_class=JsonRoute, tags=["adapters"], dependencies=[Depends(only_admin)])


@router.post("/v1/load_lora_adapter", response_model=AdapterInfo, responses=ERRORS)
async def load_adapter(body: LoadAdapterRequest, context: OpenContext) -> Response:
    """Load an adapter under a name; once this returns, every replica serves it."""
    wanted = Registration(
        name=body.lora_name,
        place=body.lora_path,
        base=body.base_model_name,
        replaces=bool(body.load_inplace),
        percent=100 if body.percent is None else body.percent,
    )
    adapters = context.server.adapters
    if body.canary is None:
        entry = await adapters.load(wanted)
    else:
        entry = await adapters.load_if(wanted, partial(ask, context.gateway, canary=body.canary))
    return JsonResponse(_info(AdapterStatus(entry=entry, places_by_replica={})))


@router.post("/v1/unload_lora_adapter", response_model=UnloadedAdapter, responses=ERRORS)
async def unload_adapter(body: UnloadAdapterRequest, context: OpenContext) -> Response:
    """Unload an adapter, wait for the requests that use it, and free it on every replica."""
    freed = await context.server.adapters.unload(body.lora_name, body.version)
    return JsonResponse(UnloadedAdapter(id=body.lora_name, version=body.version, freed_bytes=freed))


@router.get("/v1/adapters", response_model=AdapterList, responses=ERRORS)
async def list_adapters(context: OpenContext) -> Response:
    """List adapters, their versions, and where each version is in memory."""
    return JsonResponse(AdapterList(data=[_info(status) for status in await context.server.adapters.status()]))


@router.post("/v1/adapters/{name}/route", response_model=AdapterInfo, responses=ERRORS)
async def route_adapter(name: str, body: RouteAdapterRequest, context: OpenContext) -> Response:
    """Promote a version, roll back to one, or split a name's traffic among several."""
    entry = await context.server.adapters.route(name, {int(number): percent for number, percent in body.split.items()})
    return JsonResponse(_info(AdapterStatus(entry=entry, places_by_replica={})))


def _info(status: AdapterStatus) -> AdapterInfo:
    entry = status.entry
    shares = dict(entry.split)
    return AdapterInfo(
        id=entry.name,
        parent=entry.base,
        versions=[
            AdapterVersionInfo(
                version=version.number,
                digest=version.ref.digest,
                created=version.created_s,
                percent=shares.get(version.number, 0),
                state=_state(status, version, has_traffic=version.number in shares),
                reason=status.misfits.get(version.number),
                replicas=dict(status.places_by_replica.get(version.number, {})),
            )
            for version in entry.versions
        ],
    )


def _state(status: AdapterStatus, version: AdapterVersion, *, has_traffic: bool) -> VersionState:
    if version.number in status.misfits:
        return "misfit"
    if version.is_on_trial:
        return "trial"
    return "serving" if has_traffic else "standby"
