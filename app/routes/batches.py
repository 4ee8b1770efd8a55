"""`/v1/batches`: requests of a file, answered behind all others. A tenant sees its own."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from app.http.errors import ApiError
from app.http.file_form import ExpiresAfter
from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.routes.files import After, Batches
from app.schemas.wire import Metadata, WirePage, WireRequest, WireResponse
from deployments.batches.values import Batch, BatchStatus, NewBatch, PageQuestion


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


class BatchList(WirePage[BatchObject]):
    """A page of batches, newest first."""


MAX_PAGE = 100

BatchId = Annotated[str, Path(max_length=64)]

router = APIRouter(route_class=JsonRoute, tags=["batches"])


@router.post("/v1/batches", response_model=BatchObject, responses=ERRORS)
async def create_batch(body: BatchRequest, context: Context, batches: Batches, request: Request) -> Response:
    """Start running the requests of a file."""
    if body.endpoint not in request.app.state.paths:
        message = f"Unsupported: 'endpoint': this server has no route '{body.endpoint}'."
        raise ApiError(400, message, param="endpoint", code="unsupported_value")
    new = NewBatch(
        tenant=context.tenant,
        input_file_id=body.input_file_id,
        endpoint=body.endpoint,
        metadata=body.metadata,
        outputs_last_s=None if body.output_expires_after is None else body.output_expires_after.seconds,
    )
    return JsonResponse(_batch(await batches.create(new)))


@router.get("/v1/batches", response_model=BatchList, responses=ERRORS)
async def list_batches(
    context: Context,
    batches: Batches,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 20,
) -> Response:
    """List batches, newest first."""
    page = await batches.list_batches(context.tenant, PageQuestion(limit=limit, after=after))
    data = [_batch(batch) for batch in page.items]
    return JsonResponse(BatchList.of(data, [batch.id for batch in data], has_more=page.has_more))


@router.get("/v1/batches/{batch_id}", response_model=BatchObject, responses=ERRORS)
async def retrieve_batch(batch_id: BatchId, context: Context, batches: Batches) -> Response:
    """Return the current state of a batch."""
    return JsonResponse(_batch(await batches.batch(context.tenant, batch_id)))


@router.post("/v1/batches/{batch_id}/cancel", response_model=BatchObject, responses=ERRORS)
async def cancel_batch(batch_id: BatchId, context: Context, batches: Batches) -> Response:
    """Cancel the remaining requests; finished answers stay in the output file."""
    return JsonResponse(_batch(await batches.cancel(context.tenant, batch_id)))


def _batch(batch: Batch) -> BatchObject:
    later = (status for status in BatchStatus if status is not BatchStatus.VALIDATING)
    reached: dict[str, Any] = {f"{status}_at": batch.reached_s.get(status) for status in later}
    errors = [InputError(**asdict(error)) for error in batch.errors]
    return BatchObject(
        id=batch.batch_id,
        endpoint=batch.endpoint,
        model=batch.model,
        errors=InputErrors(data=errors) if errors else None,
        input_file_id=batch.input_file_id,
        status=batch.status,
        output_file_id=batch.output_file_id,
        error_file_id=batch.error_file_id,
        created_at=batch.created_s,
        expires_at=batch.expires_s,
        request_counts=RequestCounts(**asdict(batch.counts)),
        metadata=batch.metadata,
        **reached,
    )
