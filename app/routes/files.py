"""`/v1/files`: what batches read and write. A tenant sees its own."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Depends, Path, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from app.http.errors import ApiError
from app.http.file_form import file_form
from app.http.json_route import JsonResponse, JsonRoute
from app.routes.context import ERRORS, Context
from app.schemas.wire import IfAny, WirePage, WireResponse
from deployments.batches.values import INPUT_PURPOSE, PageQuestion, StoredFile

if TYPE_CHECKING:
    from deployments.batches.client import BatchClient


class FileObject(WireResponse):
    """A file."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: IfAny[int] = None
    filename: str
    purpose: str = Field(description="`batch` for uploaded files, `batch_output` for files that batches wrote.")
    status: Literal["processed"] = "processed"
    status_details: IfAny[None] = None


class FileList(WirePage[FileObject]):
    """A page of files."""


class DeletedFile(WireResponse):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


UPLOAD = ("POST", "/v1/files")
"""The one route whose body is not JSON, and may be larger than others."""
MAX_PAGE = 10_000

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": [INPUT_PURPOSE]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
}

router = APIRouter(route_class=JsonRoute, tags=["files"])


async def _batches(context: Context) -> BatchClient:
    batches = context.server.batches
    if batches is None:
        raise ApiError(404, "This server has files and batches disabled: `batches` is null.", code="batches_disabled")
    return batches


Batches = Annotated["BatchClient", Depends(_batches)]
FileId = Annotated[str, Path(max_length=64)]
After = Annotated[str | None, Query(max_length=64, description="The last id of the previous page.")]


@router.post(
    "/v1/files",
    response_model=FileObject,
    responses=ERRORS,
    openapi_extra={"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}},
)
async def create_file(request: Request, context: Context, batches: Batches) -> Response:
    """Upload a file."""
    max_file_bytes = request.app.state.max_file_bytes
    async with (
        batches.upload(context.tenant) as upload,
        file_form(request, upload.claim, tenant=context.tenant, max_file_bytes=max_file_bytes) as (new, parts),
    ):
        stored = await upload.store(new, parts)
    return JsonResponse(_file(stored))


@router.get("/v1/files", response_model=FileList, responses=ERRORS)
async def list_files(
    context: Context,
    batches: Batches,
    after: After = None,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
    purpose: Annotated[str | None, Query(max_length=64)] = None,
) -> Response:
    """List files, newest first by default."""
    question = PageQuestion(limit=limit, after=after, is_ascending=order == "asc", purpose=purpose)
    page = await batches.list_files(context.tenant, question)
    data = [_file(stored) for stored in page.items]
    return JsonResponse(FileList.of(data, [file.id for file in data], has_more=page.has_more))


@router.get("/v1/files/{file_id}", response_model=FileObject, responses=ERRORS)
async def retrieve_file(file_id: FileId, context: Context, batches: Batches) -> Response:
    """Describe a file."""
    return JsonResponse(_file(await batches.file(context.tenant, file_id)))


@router.get(
    "/v1/files/{file_id}/content",
    response_class=Response,
    responses=ERRORS | {200: {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def file_content(file_id: FileId, context: Context, batches: Batches) -> Response:
    """Return the content of a file."""
    stored = await batches.file(context.tenant, file_id)
    parts = batches.content(context.tenant, file_id)
    # Before the response begins: the content may be gone, or the disk away.
    first = await anext(parts, b"")
    return StreamingResponse(
        _joined(first, parts),
        media_type="application/octet-stream",
        # Whoever reads notices where the stream breaks off; a browser never takes it for a page.
        headers={"content-length": str(stored.num_bytes), "x-content-type-options": "nosniff"},
    )


@router.delete("/v1/files/{file_id}", response_model=DeletedFile, responses=ERRORS)
async def delete_file(file_id: FileId, context: Context, batches: Batches) -> Response:
    """Delete a file, unless an unfinished batch reads it."""
    await batches.delete_file(context.tenant, file_id)
    return JsonResponse(DeletedFile(id=file_id))


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    yield first
    async for part in rest:
        yield part


def _file(stored: StoredFile) -> FileObject:
    return FileObject(
        id=stored.file_id,
        bytes=stored.num_bytes,
        created_at=stored.created_s,
        expires_at=stored.expires_s,
        filename=stored.name,
        purpose=stored.purpose,
    )
