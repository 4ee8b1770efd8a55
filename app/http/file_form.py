"""Read an uploaded file: a multipart form of bounded size, written to disk while it is read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

from fastapi import Request
from pydantic import Field, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from app.http.errors import ApiError
from app.http.field_errors import invalid_body
from app.http.json_route import unsupported_media
from app.http.middleware import bounded
from app.schemas.wire import WireRequest
from deployments.batches.values import INPUT_PURPOSE, MAX_PART_BYTES, NewFile
from deployments.errors import unavailable_on

MAX_FILE_NAME_CHARS = 255
_OTHER_BYTES = 64 << 10
"""Maximum bytes of a form besides the file."""
_MAX_FIELDS = 8
_CHARSETS = {"utf-8", "utf8", "us-ascii", "ascii", "iso-8859-1", "latin-1", "latin1"}
"""Others are codecs of Python's, in which the form's fields would be read on the event loop: some take seconds."""
_EXPIRY = {"expires_after[anchor]": "anchor", "expires_after[seconds]": "seconds"}


class ExpiresAfter(WireRequest):
    """When a file expires."""

    anchor: Literal["created_at"] = Field(description="Time from which the seconds count.")
    seconds: int = Field(ge=3600, le=2_592_000, description="One hour to thirty days.")


@asynccontextmanager
async def file_form(
    request: Request, claim: Callable[[int], Awaitable[None]], *, tenant: str, max_file_bytes: int
) -> AsyncIterator[tuple[NewFile, AsyncIterator[bytes]]]:
    """Read the form of an upload to a file and its content in parts; its disk space is freed at the end of the block.

    Args:
        claim: called with the bytes that the file has at least before anything is read, as far as they are known,
            and again for each further part; raises if there is no room for them.

    Raises:
        ApiError: the body is not a form, was interrupted or is too large, or a field is invalid or unknown.
        UnavailableError: the disk for temporary files is not available now; the parts raise it, too.
    """
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise unsupported_media("The content type must be 'multipart/form-data'.", "content-type")
    _check_charset(request.headers["content-type"])
    most = max_file_bytes + _OTHER_BYTES
    receive = bounded(request.scope, request.receive, most, _too_large(max_file_bytes))
    await claim(_least_bytes(request))
    asked = Request(request.scope, _claiming(receive, claim))
    try:
        with unavailable_on(OSError):
            form = await asked.form(max_files=1, max_fields=_MAX_FIELDS, max_part_size=_OTHER_BYTES)
    except HTTPException as error:
        raise ApiError(400, f"The form could not be read: {error.detail}", code="invalid_form") from error
    except ClientDisconnect as error:
        raise ApiError(400, "The upload was interrupted.", param="file", code="invalid_form") from error
    try:
        file = _checked(form, max_file_bytes)
        name = "".join(char for char in file.filename or "" if char.isprintable())[:MAX_FILE_NAME_CHARS]
        yield NewFile(tenant=tenant, name=name or "file", purpose=INPUT_PURPOSE, lasts_s=_lasts_s(form)), _parts(file)
    finally:
        await form.close()


def _check_charset(content_type: str) -> None:
    charset = parse_options_header(content_type)[1].get(b"charset", b"utf-8").decode("latin-1")
    if charset.lower() not in _CHARSETS:
        raise ApiError(400, "The form could not be read in its charset; use 'utf-8'.", code="invalid_form")


def _least_bytes(request: Request) -> int:
    """Return how many bytes the file has at least by the body's length; 0 if that is not told."""
    length = request.headers.get("content-length", "")
    return max(0, int(length) - _OTHER_BYTES) if length.isascii() and length.isdigit() else 0


def _claiming(receive: Receive, claim: Callable[[int], Awaitable[None]]) -> Receive:
    """Return what receives the body, and claims room for each part of it that has come."""
    num_bytes = num_claimed = 0

    async def receive_claimed() -> Message:
        nonlocal num_bytes, num_claimed
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes - num_claimed >= MAX_PART_BYTES:
            num_claimed = num_bytes
            await claim(max(0, num_bytes - _OTHER_BYTES))
        return message

    return receive_claimed


def _checked(form: FormData, max_file_bytes: int) -> UploadFile:
    for name in form:
        if name not in ("file", "purpose", *_EXPIRY):
            raise ApiError(400, f"Unknown parameter: '{name[:64]}'.", param=name[:64], code="unknown_parameter")
        if len(form.getlist(name)) > 1:
            raise ApiError(400, f"The field '{name}' stands twice in the form.", param=name, code="duplicate_key")
    file, purpose = form.get("file"), form.get("purpose")
    for name, value in (("file", file), ("purpose", purpose)):
        if value is None:
            raise ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "Invalid value: 'file' must be a file.", param="file", code="invalid_type")
    if purpose != INPUT_PURPOSE:
        message = f"Unsupported: 'purpose': this server keeps files of the purpose '{INPUT_PURPOSE}' only."
        raise ApiError(400, message, param="purpose", code="unsupported_value")
    if (file.size or 0) > max_file_bytes:
        raise _too_large(max_file_bytes)
    return file


async def _parts(file: UploadFile) -> AsyncIterator[bytes]:
    while True:
        with unavailable_on(OSError):
            part = await file.read(MAX_PART_BYTES)
        if not part:
            return
        yield part


def _lasts_s(form: FormData) -> int | None:
    given: dict[str, object] = {field: form[name] for name, field in _EXPIRY.items() if name in form}
    if not given:
        return None
    seconds = given.get("seconds")
    if isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and len(seconds) < 12:
        given["seconds"] = int(seconds)
    try:
        return ExpiresAfter.model_validate(given).seconds
    except ValidationError as error:
        errors = [{**detail, "loc": ("body", "expires_after", *detail["loc"])} for detail in error.errors()]
        raise invalid_body(errors, {"expires_after": given}) from error


def _too_large(max_file_bytes: int) -> ApiError:
    message = f"'file' is over {max_file_bytes} bytes (`batches.max_file_bytes`)."
    return ApiError(413, message, param="file", code="request_too_large")
