"""`/v1/batches`: OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.files import ExpiresAfter
from app.schemas.wire import Metadata, WireRequest, WireResponse


class BatchRequest(WireRequest):
    """Requests of an uploaded file that are to be answered when there is room."""

    input_file_id: str = Field(max_length=64, description="A file of purpose `batch`: a JSON object on each line.")
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"] = Field(
        description="The route of every line."
    )
    completion_window: Literal["24h"] = Field(description="What is not answered by then is given up.")
    metadata: Metadata | None = Field(default=None, description="Told again with the batch.")
    output_expires_after: ExpiresAfter | None = Field(
        default=None, description="When the output files go by themselves; null: never."
    )


class RequestCounts(WireResponse):
    """Lines of a batch; `failed` ones are in the error file."""

    total: int
    completed: int
    failed: int


class InputError(WireResponse):
    """What is wrong with an input file, and on which line."""

    code: str
    message: str
    line: int | None
    param: str | None


class InputErrors(WireResponse):
    """The first mistakes of an input file."""

    object: Literal["list"] = "list"
    data: list[InputError]


class BatchObject(WireResponse):
    """A batch as it stands; times are Unix seconds."""

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
    """A page of batches, the newest first."""

    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
