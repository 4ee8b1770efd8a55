"""Values exchanged between gateways and the actor `Batches`: files, batches and their lines, responses. Pure."""

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
MIN_FILE_BYTES = 4096
"""What a file counts at least, however small its content: even an empty one takes a row and a name in a folder."""
MAX_PART_BYTES = 1 << 20
"""Maximum part of a content in one message. Serve's messages to a replica hold 4 MiB, unless the variable
RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH is set, as `antiphon serve` does."""


class BatchStatus(StrEnum):
    """The status of a batch, with OpenAI's names."""

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
        expires_s: None if the file stays until it is deleted.
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
    """A file to store for a tenant, for `lasts_s` seconds or, if None, until it is deleted."""

    tenant: str
    name: str
    purpose: str
    lasts_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LineError:
    """An error in an input file; `line` counts from 1, `param` is a field of the line."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBatch:
    """A batch to run for a tenant.

    Attributes:
        outputs_last_s: lifetime of its output files in seconds; None if they stay until deleted.
    """

    tenant: str
    input_file_id: str
    endpoint: str
    metadata: dict[str, str] | None = None
    outputs_last_s: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCounts:
    """Numbers of lines of a batch; the `failed` ones are in its error file."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The current state of a batch.

    Attributes:
        reached_s: Unix seconds at which it reached each status.
        output_file_id, error_file_id: None until the batch has ended, and if the file would be empty.
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
class KeptResponse:
    """A response that later ones can continue.

    Attributes:
        previous_id: the response that it continues, if any.
        created_s: Unix seconds.
        input_items: the input items that its own request brought, a JSON list.
        body: the response, a JSON object.
    """

    response_id: str
    tenant: str
    previous_id: str | None
    created_s: int
    input_items: bytes
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Page(Generic[T]):
    """A page of a list, and whether more items follow."""

    items: tuple[T, ...]
    has_more: bool


class PageQuestion(NamedTuple):
    """A request for a page of a list: at most `limit` items after the one with id `after`."""

    limit: int
    after: str | None = None
    is_ascending: bool = False
    purpose: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideCall:
    """A request that the server makes to itself for a tenant.

    Attributes:
        body: JSON; empty if there is none.
        timeout_s: deadline of the answer in seconds.
    """

    tenant: str
    method: str
    path: str
    request_id: str
    body: bytes = b""
    timeout_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InsideAnswer:
    """The answer to such a request.

    Attributes:
        retry_after_s: when to come back, if it says so.
        is_final: it says that the request would fail again.
    """

    status: int
    body: bytes = b""
    retry_after_s: float | None = None
    is_final: bool = False
