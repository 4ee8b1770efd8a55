"""Settings for tenants: keys, origins, and limits."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from app.settings_node import FolderPath, PublicName, SettingsNode

_HOST_NAME = re.compile(r"(?:\*\.)?[A-Za-z0-9_-]+(?:\.[A-Za-z0-9_-]+)*")


def _host_name(text: str) -> str:
    if _HOST_NAME.fullmatch(text) is None:
        raise ValueError(
            f"'{text}' is not a host name: name.example, or *.name.example for all below it, in ASCII and without "
            "scheme, port and path; addresses are always accepted"
        )
    return text


HostName = Annotated[str, StringConstraints(min_length=1, max_length=253), AfterValidator(_host_name)]
"""A name in `Host`, or `*.name`; a name of another form could never match."""

Origin = Annotated[
    str,
    StringConstraints(max_length=300, pattern=r"^(?:\*|https?://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?)$"),
]
"""`https://host[:port]` without a path, in lower case, or `*`. Browsers omit the default port of the scheme."""

VariableName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
KeyDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of a key, in lower-case hex: `printf %s KEY | sha256sum`."""


class TenantLimitSettings(SettingsNode):
    """Limits of one tenant, across all gateways; null: no limit."""

    requests_per_minute: int | None = Field(
        default=None, ge=1, description="Answers started; each choice counts as one."
    )
    input_tokens_per_minute: int | None = Field(default=None, ge=1, description="Prompt tokens.")
    output_tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="Generated tokens; a request may start if one is left, and any excess is counted.",
    )
    concurrent_requests: int | None = Field(
        default=None, ge=1, description="Answers in progress; each choice counts as one."
    )


class TenantSettings(SettingsNode):
    """One tenant: its API keys, models, priority and limits."""

    name: PublicName = Field(description="Name of the tenant.")
    keys_sha256: tuple[KeyDigest, ...] = Field(
        default=(), description="SHA-256 of each API key, in hex; more keys can be created while the server runs."
    )
    key_variables: tuple[VariableName, ...] = Field(
        default=(), description="Environment variables that hold further API keys, set where the server is started."
    )
    models: tuple[PublicName, ...] | None = Field(
        default=None, description="Base models and adapters it may use; null: all."
    )
    priority: int = Field(
        default=0, ge=-(2**20), le=2**20, description="Added to the priority of its requests; lower is served first."
    )
    limits: TenantLimitSettings = Field(default_factory=TenantLimitSettings, description="Rate limits and concurrency.")


class AccountSettings(SettingsNode):
    """Where usage and limits are stored; managed by the actor `Accounts`."""

    database_url: str | None = Field(
        default=None,
        description="SQLAlchemy URL of the database for usage records and keys; null: SQLite beside `spool_folder`.",
    )
    limits_url: str = Field(default="memory://", description="Storage URL of the `limits` library for limit counters.")
    spool_folder: FolderPath = Field(
        default=".antiphon/usage", description="Folder on each node for records not yet in the database."
    )
