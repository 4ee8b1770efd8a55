"""`/v1/files`: OpenAI's shapes."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from app.schemas.wire import IfAny, WireRequest, WireResponse


class ExpiresAfter(WireRequest):
    """When a file expires."""

    anchor: Literal["created_at"] = Field(description="Time from which the seconds count.")
    seconds: int = Field(ge=3600, le=2_592_000, description="One hour to thirty days.")


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


class FileList(WireResponse):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(WireResponse):
    """A deleted file."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
