"""The adapters' own routes: loading and unloading in vLLM's shape, and what there is."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from app.schemas.wire import WireRequest, WireResponse
from deployments.registry.adapter_changes import Place


class Canary(WireRequest):
    """A question that a content must answer before its name stands for it."""

    prompt: str = Field(min_length=1, max_length=65536, description="What a user says; asked greedily, as a chat.")
    max_tokens: int = Field(default=16, ge=1, le=1024, description="Tokens of the answer.")
    expect: str | None = Field(default=None, max_length=4096, description="Text that the answer must contain.")


class LoadAdapterRequest(WireRequest):
    """Make the content of a folder or a URL the newest version of a name."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"is_3d_lora_weight": (None, False), "pinned": (None, False)}

    lora_name: str = Field(min_length=1, max_length=128, description="Name that clients will ask it by.")
    lora_path: str = Field(
        min_length=1,
        max_length=4096,
        description="Adapter in PEFT layout: a name in the model's drop-in folder, a path inside a permitted folder, a "
        "URL with a permitted beginning (`registry.sources`), or an id of the Hugging Face hub under one.",
    )
    base_model_name: str | None = Field(
        default=None, max_length=128, description="Base model; may be left out where there is only one."
    )
    load_inplace: bool | None = Field(
        default=None, description="Whether a name that is loaded already gets a new version; else that is an error."
    )
    canary: Canary | None = Field(
        default=None, description="Asked of the adapter first; if that fails, the name stands for what it did before."
    )


class UnloadAdapterRequest(WireRequest):
    """Forget a name, or one version of it."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"lora_int_id": (None,)}

    lora_name: str = Field(min_length=1, max_length=128)
    version: int | None = Field(default=None, ge=1, le=2**31 - 1, description="This version only.")


class RouteAdapterRequest(WireRequest):
    """Split a name's traffic among its versions."""

    split: dict[Annotated[str, Field(pattern=r"^[0-9]{1,9}$")], Annotated[int, Field(ge=1, le=100)]] = Field(
        min_length=1, max_length=64, description="Percentages by version; together they make 100."
    )


class AdapterVersionInfo(WireResponse):
    """One content of a name."""

    version: int
    digest: str = Field(description="SHA-256 of its tensors and of what counts of its configuration.")
    created: int = Field(description="Unix time in seconds.")
    percent: int = Field(description="Share of the name's traffic.")
    state: Literal["serving", "standby", "trial"] = Field(
        description="`serving` has a share of the traffic, `standby` has none, `trial` has not had one yet."
    )
    replicas: dict[str, Place] = Field(description="Where it lies now, on the replicas that have it in memory.")


class AdapterInfo(WireResponse):
    """A name."""

    id: str
    object: Literal["adapter"] = "adapter"
    parent: str = Field(description="Name of the base model.")
    versions: list[AdapterVersionInfo]


class AdapterList(WireResponse):
    """All names."""

    object: Literal["list"] = "list"
    data: list[AdapterInfo]


class UnloadedAdapter(WireResponse):
    """What unloading has freed."""

    id: str
    object: Literal["adapter.unloaded"] = "adapter.unloaded"
    version: int | None = None
    freed_bytes: list[int] = Field(description="Memory, for each replica that answered; none where nothing was freed.")
