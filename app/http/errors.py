"""Error responses (status 400 and above): our exception `ApiError`, and the one mapping of other errors to it.

The text of an exception reaches a client only if it was written for clients, and without addresses and absolute paths.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping

from engine.errors import FailedAloneError, OverloadError, RequestError

MAX_RETRY_AFTER_S = 120
"""The OpenAI SDK gives up if it is told to wait longer."""
MAX_SPREAD_S = 5
"""Maximum jitter in seconds, so that clients refused together do not all retry together."""
DO_NOT_RETRY = {"x-should-retry": "false"}
"""OpenAI's and Anthropic's SDKs retry a 5xx unless they are told so."""

_MAX_MESSAGE_CHARS = 1000
_STATUS_BY_CODE = {
    "model_not_found": 404,
    "file_not_found": 404,
    "batch_not_found": 404,
    "response_not_found": 404,
    "storage_full": 413,
    "batch_limit_exceeded": 429,
}
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]+")
_FILE_PATH = re.compile(r"(?<![\w.:/])/(?!v1/)(?:[\w.~+-]+/)+[\w.~+-]*")
"""Matches absolute paths except our own routes, which messages may point clients to."""


class ApiError(Exception):
    """An error response in OpenAI's format.

    Attributes:
        param: the offending field as `messages[0].content`, or None.
        code: machine-readable reason, or None.
        headers: further response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        error_type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.error_type = error_type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body; it can always be encoded, whatever the client sent."""
        detail = {"message": self.message, "type": self.error_type, "param": self.param, "code": self.code}
        return {"error": {key: _encodable(value) for key, value in detail.items()}}


def to_api_error(error: BaseException) -> ApiError:
    """Return the error response that a client may see for `error`, whatever its type."""
    match error:
        case ApiError():
            return error
        case RequestError():
            status = _STATUS_BY_CODE.get(error.code or "", 400)
            return ApiError(status, without_internals(error.message), param=error.field, code=error.code)
        case OverloadError():
            headers = DO_NOT_RETRY if error.is_final else {"retry-after": str(retry_after(error.retry_after_s))}
            return ApiError(
                503,
                without_internals(error.message),
                error_type="server_error",
                code="server_overloaded",
                headers=headers,
            )
        case TimeoutError():
            return ApiError(
                504, "The answer was not ready before its deadline.", error_type="server_error", code="timeout"
            )
        case FailedAloneError():
            message = without_internals(str(error))
            return ApiError(500, message, error_type="server_error", headers=DO_NOT_RETRY)
    return ApiError(500, "The server had an error while processing the request.", error_type="server_error")


def retry_after(wait_s: float) -> int:
    """Return whole seconds for `Retry-After`: `wait_s` plus random jitter, at most `MAX_RETRY_AFTER_S`."""
    soonest = min(MAX_RETRY_AFTER_S, max(1, math.ceil(wait_s)))
    return min(MAX_RETRY_AFTER_S, soonest + random.randint(0, min(MAX_SPREAD_S, 1 + soonest // 4)))


def is_our_fault(error: BaseException) -> bool:
    """Return whether `error` is an internal failure to investigate, unlike overload or a missed deadline.

    A request that failed alone is not: its sentence is logged, and a traceback of the gateway would add nothing.
    """
    return to_api_error(error).status == 500 and not isinstance(error, FailedAloneError)


def without_internals(message: str) -> str:
    """Return `message` without memory addresses and absolute paths."""
    return _FILE_PATH.sub("[path]", _ADDRESS.sub("[address]", message))


def _encodable(value: str | None) -> str | None:
    if value is None:
        return None
    return value[:_MAX_MESSAGE_CHARS].encode("utf-8", "replace").decode()
