"""The adapters' own routes: loading and unloading in vLLM's shape, and what there is."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from app.schemas.wire import IfAny, WireRequest, WireResponse
from deployments.registry.adapter_changes import Place

VersionState = Literal["serving", "standby", "trial", "misfit"]


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

    split: dict[Annotated[str, Field(pattern=r"^[1-9][0-9]{0,8}$")], Annotated[int, Field(ge=1, le=100)]] = Field(
        min_length=1, max_length=64, description="Percentages by version; they must add up to 100."
    )


class AdapterVersionInfo(WireResponse):
    """One version of an adapter."""

    version: int
    digest: str = Field(description="SHA-256 of its tensors and the relevant parts of its configuration.")
    created: int = Field(description="Unix time in seconds.")
    percent: int = Field(description="Share of the name's traffic, in percent.")
    state: VersionState = Field(
        description="`serving` has a share of the traffic, `standby` has none, `trial` has never had one; `misfit` was "
        "loaded for another checkpoint of the base model, and its requests fail."
    )
    reason: IfAny[str] = Field(default=None, description="Why a `misfit` does not fit the base model.")
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
    """Memory freed by unloading."""

    id: str
    object: Literal["adapter.unloaded"] = "adapter.unloaded"
    version: int | None = None
    freed_bytes: list[int] = Field(description="Bytes freed, per replica that responded; empty if nothing was freed.")
