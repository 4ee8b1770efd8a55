"""The routes that load, unload, list and route adapters, in vLLM's shape; all of them need the admin key."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Annotated, ClassVar, Literal

from fastapi import APIRouter, Depends, Response
from pydantic import Field

from adapters.catalogue import AdapterVersion
from app.gateway_port import GatewayPort
from app.http.json_route import JsonResponse, JsonRoute, respond
from app.routes.context import ERRORS, OpenContext, only_admin
from app.schemas.wire import IfAny, WireRequest, WireResponse
from app.translation.streaming import collect
from deployments.answer_events import EndReason
from deployments.generation import ChatMessage, ChatPrompt, GenerationRequest
from deployments.registry.adapter_changes import AdapterStatus, Place, Registration
from engine.errors import EngineError, FailedAloneError, RequestError
from engine.request import SamplingParams

CANARY_TIMEOUT_S = 120.0

VersionState = Literal["serving", "standby", "trial", "misfit", "shadowed"]


class Canary(WireRequest):
    """A test prompt that an adapter must answer before its name moves to it."""

    prompt: str = Field(min_length=1, max_length=65536, description="User message of a chat, decoded greedily.")
    max_tokens: int = Field(default=16, ge=1, le=1024, description="Maximum number of tokens in the answer.")
    expect: str | None = Field(default=None, max_length=4096, description="Text that the answer must contain.")


class LoadAdapterRequest(WireRequest):
    """Load an adapter from a folder or a URL as the newest version of a name."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"is_3d_lora_weight": (None, False), "pinned": (None, False)}

    lora_name: str = Field(min_length=1, max_length=128, description="Name that clients request.")
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Adapter in PEFT layout: a name in the model's drop-in folder, a path inside an allowed folder, a "
        "URL with an allowed prefix (`registry.sources`), or a Hugging Face Hub id under one.",
    )
    base_model_name: str | None = Field(
        default=None, max_length=128, description="Optional if there is only one base model."
    )
    load_inplace: bool | None = Field(
        default=None, description="Add a version if the name is already loaded; otherwise, that is an error."
    )
    percent: int | None = Field(
        default=None,
        ge=0,
        le=100,
        description="Share of the name's traffic for the new version, by default 100. The others keep their "
        "proportions. With 0, only `name@version` reaches it, until traffic is routed to it.",
    )
    canary: Canary | None = Field(
        default=None, description="Sent to the adapter first; if it fails, the name's traffic is not moved."
    )


class UnloadAdapterRequest(WireRequest):
    """Unload a name, or one version of it."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"lora_int_id": (None,)}

    lora_name: str = Field(min_length=1, max_length=128)
    version: int | None = Field(default=None, ge=1, le=2**31 - 1, description="Unload only this version.")


class RouteAdapterRequest(WireRequest):
    """Split a name's traffic among its versions."""

    split: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Annotated[int, Field(ge=0, le=100)]] = Field(
        min_length=1, max_length=64, description="Percentages by version; they must add up to 100. 0: no traffic."
    )


class AdapterVersionInfo(WireResponse):
    """One version of an adapter."""

    version: int
    digest: str = Field(description="SHA-256 of its tensors and the relevant parts of its configuration.")
    created: int = Field(description="Unix time in seconds.")
    invocation_token_ids: IfAny[list[int]] = Field(
        default=None, description="The adapter applies from the last occurrence of these in a prompt on (aLoRA)."
    )
    num_labels: IfAny[int] = Field(default=None, description="Labels of its classifier, for `/classify`.")
    percent: int = Field(description="Share of the name's traffic, in percent.")
    state: VersionState = Field(
        description="`serving` has a share of the traffic, `standby` has none, `trial` has never had one; `misfit` was "
        "loaded for another checkpoint of the base model, and its requests fail; `shadowed` cannot be requested, as a "
        "model has its name."
    )
    reason: IfAny[str] = Field(
        default=None, description="Why a `misfit` does not fit the base model, or what shadows it."
    )
    replicas: dict[str, Place] = Field(description="Where it is now, for each replica that has it in memory.")


class AdapterInfo(WireResponse):
    """An adapter and its versions."""

    id: str
    object: Literal["adapter"] = "adapter"
    parent: str = Field(description="Name of the base model.")
    versions: list[AdapterVersionInfo]


class AdapterList(WireResponse):
    """All adapters."""

    object: Literal["list"] = "list"
    data: list[AdapterInfo]


class UnloadedAdapter(WireResponse):
    """Memory freed by unloading, and who has the traffic now."""

    id: str
    object: Literal["adapter.unloaded"] = "adapter.unloaded"
    version: int | None = None
    freed_bytes: list[int] = Field(description="Bytes freed, per replica that responded; empty if nothing was freed.")
    remaining: IfAny[AdapterInfo] = Field(default=None, description="The name with the versions that it still has.")


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
        entry = await adapters.load_if(wanted, partial(_ask, context.gateway, canary=body.canary))
    return JsonResponse(_info(AdapterStatus(entry=entry, places_by_replica={})))


@router.post("/v1/unload_lora_adapter", response_model=UnloadedAdapter, responses=ERRORS)
async def unload_adapter(body: UnloadAdapterRequest, context: OpenContext) -> Response:
    """Unload an adapter, wait for the requests that use it, and free it on every replica."""
    adapters = context.server.adapters
    freed = await adapters.unload(body.lora_name, body.version)
    left = adapters.entry(body.lora_name)
    remaining = None if left is None else _info(AdapterStatus(entry=left, places_by_replica={}))
    unloaded = UnloadedAdapter(id=body.lora_name, version=body.version, freed_bytes=freed, remaining=remaining)
    return JsonResponse(unloaded)


@router.get("/v1/adapters", response_model=AdapterList, responses=ERRORS)
async def list_adapters(context: OpenContext) -> Response:
    """List adapters, their versions, and where each version is in memory."""
    found = await context.server.adapters.status()
    # There may be thousands.
    return await respond(lambda: AdapterList(data=[_info(status) for status in found]), is_large=True)


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
                invocation_token_ids=list(version.ref.invocation_ids) or None,
                num_labels=version.ref.num_labels or None,
                percent=shares.get(version.number, 0),
                state=_state(status, version, has_traffic=version.number in shares),
                reason=_reason(status, version),
                replicas=dict(status.places_by_replica.get(version.number, {})),
            )
            for version in entry.versions
        ],
    )


def _state(status: AdapterStatus, version: AdapterVersion, *, has_traffic: bool) -> VersionState:
    if status.shadowed_by is not None:
        return "shadowed"
    if version.number in status.misfits:
        return "misfit"
    if version.is_on_trial:
        return "trial"
    return "serving" if has_traffic else "standby"


def _reason(status: AdapterStatus, version: AdapterVersion) -> str | None:
    if status.shadowed_by is not None:
        return f"{status.shadowed_by} has this name"
    return status.misfits.get(version.number)


async def _ask(gateway: GatewayPort, model: str, canary: Canary) -> None:
    """Ask a model the canary's question, with greedy decoding.

    Raises:
        RequestError: it does not answer, or the answer is not as expected.
        OverloadError: the server has no capacity for the question now.
    """
    request = GenerationRequest(
        request_id=f"canary-{uuid.uuid4().hex}",
        model=model,
        prompt=ChatPrompt(messages=(ChatMessage(role="user", content=canary.prompt),)),
        params=SamplingParams(max_tokens=canary.max_tokens, temperature=0.0),
        max_tokens=canary.max_tokens,
        timeout_s=CANARY_TIMEOUT_S,
    )
    try:
        (answer,) = await collect([gateway.generate(request)])
    except RequestError as error:
        raise _failed(error.message) from error
    except FailedAloneError as error:
        raise _failed(str(error)) from error
    except (EngineError, TimeoutError) as error:
        raise _failed("It was not answered.") from error
    if answer.finished.reason is EndReason.CONTENT_FILTER:
        raise _failed("The safety classifier refused the question or the answer.")
    text = answer.reasoning + answer.text
    if canary.expect is not None and canary.expect not in text:
        raise _failed(f"The answer does not contain what is expected; it is {text[:200]!r}.")


def _failed(reason: str) -> RequestError:
    return RequestError(
        f"The adapter has failed its canary, and its name has not been moved to it. {reason}", field="canary"
    )
