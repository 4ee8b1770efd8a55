"""What the routes for accounts take and answer: usage, and keys that are made while the server runs."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

from app.schemas.wire import WireRequest


class UsageInfo(BaseModel):
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


class UsageReport(BaseModel):
    """Totals for the requested period."""

    object: Literal["usage"] = "usage"
    data: list[UsageInfo]


class NewKeyRequest(WireRequest):
    """Ask for a new key for a configured tenant."""

    tenant: str = Field(max_length=128, description="Name of the tenant.")


class ApiKeyInfo(BaseModel):
    """A key created while the server was running."""

    id: str = Field(description="SHA-256 of the key.")
    object: Literal["api_key"] = "api_key"
    tenant: str
    created: int
    key: str | None = Field(default=None, description="The key itself; returned once, on creation.")


class ApiKeyList(BaseModel):
    """Keys created while the server was running, without those of the configuration."""

    object: Literal["list"] = "list"
    data: list[ApiKeyInfo]


class RemovedKey(BaseModel):
    """A revoked key."""

    id: str
    object: Literal["api_key.deleted"] = "api_key.deleted"
    deleted: Literal[True] = True
