"""What gateways and the actor `Batches` tell each other: files, batches, and one line of a batch as a request. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

INPUT_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"
WINDOW_S = 24 * 3600.0
"""Seconds from a batch's creation to its expiry: OpenAI's `completion_window` "24h"."""

MAX_LINE_BYTES = 4_000_000
MAX_PART_BYTES = 1 << 20
"""Of a content on its way: Serve's messages to a replica have 4 MiB at most."""


class BatchStatus(StrEnum):
    """Where a batch is in its life; OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


UNFINISHED = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING, BatchStatus.CANCELLING)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a tenant; times are Unix seconds.

    Attributes:
        expires_s: None for one that stays until it is deleted.
    """

    file_id: str
    tenant: str
    name: str
    purpose: str
    num_bytes: int
    created_s: int
    expires_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewFile:
    """A file that a tenant wants to be kept; `lasts_s` seconds, None for as long as nobody deletes it."""

    tenant: str
    name: str
    purpose: str
    lasts_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """What is wrong with an input file; `line` counts from 1, `param` is a field of the line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch that a tenant wants to be run.

    Attributes:
        outputs_last_s: seconds that its output files stay; None for as long as nobody deletes them.
    """

    tenant: str
    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None = None
    outputs_last_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Lines of a batch; `failed` ones are in its error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A batch as it stands.

    Attributes:
        reached_s: Unix seconds at which it came to each status.
        output_file_id, error_file_id: None until it has ended, and where there would be nothing in them.
    """

    batch_id: str
    tenant: str
    endpoint: str
    input_file_id: str
    metadata: dict[str, str] | None
    outputs_last_s: int | None
    status: BatchStatus
    created_s: int
    expires_s: int
    reached_s: dict[str, int] = field(default_factory=dict)
    model: str | None = None
    errors: tuple[LineError, ...] = ()
    counts: BatchCounts = BatchCounts()
    output_file_id: str | None = None
    error_file_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A part of a list, and whether there is more behind it."""

    items: tuple[T, ...]
    has_more: bool


class PageQuestion(NamedTuple):
    """Which part of a list is asked for: `limit` items behind the one whose id is `after`."""

    limit: int
    after: str | None = None
    is_ascending: bool = False
    purpose: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideCall:
    """A request that the server makes to itself for a tenant.

    Attributes:
        body: JSON, empty for none.
        timeout_s: how long the answer may take.
    """

    tenant: str
    method: str
    path: str
    request_id: str
    body: bytes = b""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideAnswer:
    """What came of it; `retry_after_s` (seconds) where the answer says when to come back."""

    status: int
    body: bytes = b""
    retry_after_s: float | None = None
