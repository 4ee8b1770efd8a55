"""Settings of who may ask, from where, and how much."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StringConstraints

from app.settings_node import FolderPath, PublicName, SettingsNode

HostName = Annotated[str, StringConstraints(min_length=1, max_length=253)]
"""A name in `Host`, or `*.name`."""

Origin = Annotated[
    str,
    StringConstraints(max_length=300, pattern=r"^(?:\*|https?://(?:[a-z0-9._-]+|\[[0-9a-f:]+\])(?::[0-9]{1,5})?)$"),
]
"""`https://host[:port]` without a path, in lower case, or `*`. Browsers leave out the port that the scheme implies."""

KeyDigest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""SHA-256 of a key, in lower-case hex: `printf %s KEY | sha256sum`."""


class TenantLimitSettings(SettingsNode):
    """What one tenant may use, all gateways together; null: as much as there is."""

    requests_per_minute: int | None = Field(default=None, ge=1, description="Answers begun; each choice is one.")
    input_tokens_per_minute: int | None = Field(default=None, ge=1, description="Tokens of prompts.")
    output_tokens_per_minute: int | None = Field(
        default=None, ge=1, description="Tokens of answers; who has one left may begin, and what is over counts."
    )
    concurrent_requests: int | None = Field(
        default=None, ge=1, description="Answers under way at once; each choice is one."
    )


class TenantSettings(SettingsNode):
    """One tenant: its keys, and what it may do with them."""

    name: PublicName = Field(description="Name of the tenant.")
    keys_sha256: tuple[KeyDigest, ...] = Field(
        default=(), description="SHA-256 of each of its API keys, in hex; more can be made while the server runs."
    )
    models: tuple[PublicName, ...] | None = Field(
        default=None, description="Base models and adapters that it may use; null: all."
    )
    priority: int = Field(
        default=0, ge=-(2**20), le=2**20, description="Added to that of its requests; lower is served first."
    )
    limits: TenantLimitSettings = Field(default_factory=TenantLimitSettings, description="What it may use.")


class AccountSettings(SettingsNode):
    """Where it is kept what tenants use; the actor `Accounts` holds it."""

    database_url: str | None = Field(
        default=None,
        description="Database of usage records and keys, as SQLAlchemy names it; null: SQLite beside the registry.",
    )
    limits_url: str = Field(
        default="memory://", description="Where limits are counted, as the `limits` library names it."
    )
    spool_folder: FolderPath = Field(
        default=".antiphon/usage", description="Folder on each node for records that are on their way."
    )
