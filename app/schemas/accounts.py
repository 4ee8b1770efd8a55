"""What the routes for accounts take and answer: usage, and keys that are made while the server runs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.schemas.wire import WireRequest


class UsageInfo(BaseModel):
    """What one tenant has used of one model or adapter; without keys the tenant is empty."""

    tenant: str
    model: str
    adapter: str | None = Field(description="Digest of the adapter's content.")
    num_requests: int
    num_failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    device_s: float = Field(description="Seconds of the device, shared by tokens with others in the same steps.")
    mean_ttft_s: float | None
    mean_tpot_s: float | None


class UsageReport(BaseModel):
    """Totals of the asked span."""

    object: Literal["usage"] = "usage"
    data: list[UsageInfo]


class NewKeyRequest(WireRequest):
    """A key for a tenant of the configuration."""

    tenant: str = Field(max_length=128, description="Name of the tenant.")


class ApiKeyInfo(BaseModel):
    """A key that was made while the server ran."""

    id: str = Field(description="SHA-256 of the key.")
    object: Literal["api_key"] = "api_key"
    tenant: str
    created: int
    key: str | None = Field(default=None, description="The key itself; told once, when it is made.")


class ApiKeyList(BaseModel):
    """All of them; those of the configuration are not among them."""

    object: Literal["list"] = "list"
    data: list[ApiKeyInfo]


class RemovedKey(BaseModel):
    """A key that is no longer known."""

    id: str
    object: Literal["api_key.deleted"] = "api_key.deleted"
    deleted: Literal[True] = True
