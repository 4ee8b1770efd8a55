"""`/v1/batches`: OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.files import ExpiresAfter
from app.schemas.wire import Metadata, WireRequest, WireResponse


class BatchRequest(WireRequest):
    """Run the requests of an uploaded file when there is capacity."""

    input_file_id: str = Field(max_length=64, description="File of purpose `batch`, with one JSON object per line.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"] = Field(
        description="Route of every line."
    )
    completion_window: Literal["24h"] = Field(description="Requests not answered by then are given up.")
    metadata: Metadata | None = Field(default=None, description="Repeated in the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="When the output files expire; null: never."
    )


class RequestCounts(WireResponse):
    """Line counts of a batch; `failed` lines are in the error file."""

    total: int
    completed: int
    failed: int


class InputError(WireResponse):
    """An error in an input file, and its line."""

    code: str
    message: str
    line: int | None
    param: str | None


class InputErrors(WireResponse):
    """The first errors in an input file."""

    object: Literal["list"] = "list"
    data: list[InputError]


class BatchObject(WireResponse):
    """Current state of a batch; times are Unix seconds."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None
    errors: InputErrors | None
    input_file_id: str
    completion_window: Literal["24h"] = "24h"
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(WireResponse):
    """A page of batches, newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
