"""Lines of input and output files in OpenAI's format.

{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": ...}}
{"id": ..., "custom_id": "a", "response": {"status_code": 200, "request_id": ..., "body": ...}, "error": null}
"""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from deployments.batches.values import LineError

MAX_CUSTOM_ID_CHARS = MAX_MODEL_CHARS = 256
MAX_ERRORS = 100
"""Errors reported for one input file; checking stops there."""
_BLOCK_BYTES = 1 << 12
_FIELDS = ("custom_id", "method", "url", "body")


class BadLineError(ValueError):
    """A line is invalid."""

    def __init__(self, code: str, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class ContentGoneError(Exception):
    """A file's content is missing, and will not come back: the folder that held it is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLine:
    """One request of a batch; `body` is encoded JSON."""

    custom_id: str
    model: str
    body: bytes


class LineReader:
    """Reads an input file line by line; a failed read can be retried and skips nothing.

    Raises:
        ContentGoneError: there is no such file.
        OSError: it cannot be opened now.
    """

    def __init__(self, path: str, max_line_bytes: int) -> None:
        self._file = open_content(path)
        self._max_bytes = max_line_bytes
        self._offset = 0
        self.number = 0

    def next(self) -> bytes | None:
        """Return the next non-blank line, or None at the end. Lines over the limit are cut one byte above it.

        Raises:
            OSError: the file cannot be read now.
        """
        number, start = self.number + 1, self._offset
        line = self._line_at(start)
        if not line.strip():
            num_ends, start = self._behind_blanks(start)
            number += num_ends
            line = self._line_at(start)
        offset = start + len(line)
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = self._file.readline(1 << 16)
            offset += len(rest)
        self._offset = offset
        if not line:
            return None
        self.number = number
        return line

    def _line_at(self, offset: int) -> bytes:
        self._file.seek(offset)
        return self._file.readline(self._max_bytes + 1)

    def _behind_blanks(self, offset: int) -> tuple[int, int]:
        """Return how many lines end before the next byte that is no white space, and where that is."""
        # By blocks: a file may hold 200 million blank lines, and the disk's thread reads them.
        self._file.seek(offset)
        num_ends = 0
        while block := self._file.read(_BLOCK_BYTES):
            rest = block.lstrip()
            num_blanks = len(block) - len(rest)
            num_ends += block.count(b"\n", 0, num_blanks)
            offset += num_blanks
            if rest:
                break
        return num_ends, offset

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def open_content(path: str) -> BinaryIO:
    """Open a file's content.

    Raises:
        ContentGoneError: there is no such file.
        OSError: it cannot be read now.
    """
    try:
        return open(path, "rb")
    except FileNotFoundError:
        if not Path(path).parent.is_dir():
            raise
        raise ContentGoneError from None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputReport:
    """The result of checking an input file: its number of lines and model, or its errors."""

    num_lines: int
    model: str
    errors: tuple[LineError, ...]


def check_input(path: str, endpoint: str, *, max_lines: int, max_line_bytes: int) -> InputReport:
    """Check a whole input file: each line is valid, each `custom_id` unique, one model, at most `max_lines` lines.

    Raises:
        ContentGoneError, OSError: as `LineReader`.
    """
    errors: list[LineError] = []
    custom_ids: set[str] = set()
    model, num_lines = "", 0
    with closing(LineReader(path, max_line_bytes)) as reader:
        while (raw := reader.next()) is not None and len(errors) < MAX_ERRORS:
            num_lines += 1
            if num_lines > max_lines:
                message = f"The file has more than {max_lines} lines (`batches.max_lines`)."
                errors.append(LineError(code="too_many_lines", message=message, line=reader.number))
                break
            try:
                line = parse_line(raw, endpoint, max_line_bytes=max_line_bytes)
                model = model or line.model
                _check_beside_others(line, custom_ids, model)
            except BadLineError as error:
                errors.append(LineError(code=error.code, message=error.message, line=reader.number, param=error.param))
            else:
                custom_ids.add(line.custom_id)
    if not num_lines:
        errors.append(LineError(code="empty_file", message="The file has no lines."))
    return InputReport(num_lines=num_lines, model=model, errors=tuple(errors))


def parse_line(raw: bytes, endpoint: str, *, max_line_bytes: int) -> InputLine:
    """Return the request of a line.

    Raises:
        BadLineError: it is not a valid request, or not for this endpoint.
    """
    if len(raw) > max_line_bytes:
        raise BadLineError("line_too_long", f"The line is over {max_line_bytes} bytes.")
    try:
        line = json.loads(raw, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = error.message if isinstance(error, BadLineError) else "The line is not valid JSON."
        raise BadLineError("invalid_json_line", reason) from error
    if not isinstance(line, dict):
        raise BadLineError("invalid_json_line", "The line is not a JSON object.")
    for name in _FIELDS:
        if name not in line:
            raise BadLineError("missing_required_parameter", f"Missing required parameter: '{name}'.", param=name)
    for name in line:
        if name not in _FIELDS:
            # Half of a surrogate pair is good JSON, but no response could hold it.
            shown = name[:64].encode(errors="replace").decode()
            raise BadLineError("unknown_parameter", f"Unknown parameter: '{shown}'.", param=shown)
    return _checked(line, endpoint, max_line_bytes)


def _checked(line: dict[str, Any], endpoint: str, max_bytes: int) -> InputLine:
    custom_id, body = line["custom_id"], line["body"]
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS or not _is_text(custom_id):
        message = f"'custom_id' must be a string of 1 to {MAX_CUSTOM_ID_CHARS} characters."
        raise BadLineError("invalid_custom_id", message, param="custom_id")
    if line["method"] != "POST":
        raise BadLineError("invalid_method", "'method' must be 'POST'.", param="method")
    if line["url"] != endpoint:
        raise BadLineError("invalid_url", f"'url' must be the batch's endpoint, '{endpoint}'.", param="url")
    if not isinstance(body, dict):
        raise BadLineError("invalid_body", "'body' must be an object.", param="body")
    model = body.get("model")
    if not isinstance(model, str) or not model or not _is_text(model):
        raise BadLineError(
            "missing_required_parameter", "Missing required parameter: 'body.model'.", param="body.model"
        )
    if len(model) > MAX_MODEL_CHARS:
        message = f"'body.model' must have at most {MAX_MODEL_CHARS} characters."
        raise BadLineError("invalid_value", message, param="body.model")
    if body.get("stream"):
        raise BadLineError("unsupported_value", "'body.stream' must be false in a batch.", param="body.stream")
    try:
        encoded = json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
    except ValueError as error:
        raise BadLineError("invalid_json_line", "The line holds text that is not valid Unicode.") from error
    if len(encoded) > max_bytes:
        raise BadLineError("line_too_long", f"'body' is over {max_bytes} bytes.", param="body")
    return InputLine(custom_id=custom_id, model=model, body=encoded)


def _check_beside_others(line: InputLine, custom_ids: set[str], model: str) -> None:
    if line.custom_id in custom_ids:
        message = f"The custom_id '{line.custom_id}' stands on an earlier line too."
        raise BadLineError("duplicate_custom_id", message, param="custom_id")
    if line.model != model:
        message = f"All lines of a batch must have one model; the first has '{model[:128]}'."
        raise BadLineError("mismatched_model", message, param="body.model")


def answered_line(line_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the output line of an answered request; `line_id` is also the request id."""
    try:
        parsed = json.loads(body)
    except ValueError:
        return failed_line(line_id, custom_id, "server_error", "The server gave no answer that is JSON.")
    response = {"status_code": status, "request_id": line_id, "body": parsed}
    return _line({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def failed_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the output line of a request that was never answered."""
    error = {"code": code, "message": message}
    return _line({"id": line_id, "custom_id": custom_id, "response": None, "error": error})


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise BadLineError("invalid_json_line", "An object holds the same key twice.")
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)


def _is_text(value: str) -> bool:
    """Whether it can be encoded as UTF-8, that is, has no lone surrogate."""
    return not any("\ud800" <= char <= "\udfff" for char in value)
