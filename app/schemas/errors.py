"""OpenAI's error body."""

from __future__ import annotations

from pydantic import Field

from app.schemas.wire import WireResponse


class ErrorDetail(WireResponse):
    """What went wrong and in which field."""

    message: str = Field(description="One sentence that names the field and the bound.")
    type: str = Field(description="`invalid_request_error`, `not_found_error`, `server_error`, ...")
    param: str | None = Field(description="The offending field, such as `messages[0].content`.")
    code: str | None = Field(description="Machine-readable reason, such as `context_length_exceeded`.")


class ErrorResponse(WireResponse):
    """The body of every response with a status of 400 or above."""

    error: ErrorDetail
