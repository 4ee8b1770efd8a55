from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.batches.lines import (
    MAX_ERRORS,
    BadLineError,
    ContentGoneError,
    InputReport,
    LineReader,
    answered_line,
    check_input,
    failed_line,
    parse_line,
)
from tests.deployments.batches.batch_world import ENDPOINT, a_line, jsonl

LINE = a_line("a", messages=[])


def check(folder: Path, content: bytes, *, max_lines: int = 5, max_line_bytes: int = 200) -> InputReport:
    path = folder / "in.jsonl"
    path.write_bytes(content)
    return check_input(str(path), ENDPOINT, max_lines=max_lines, max_line_bytes=max_line_bytes)


def test_a_good_file_has_a_model_and_blank_lines_do_not_count(tmp_path: Path) -> None:
    report = check(tmp_path, jsonl(LINE) + b"\n  \r\n" + jsonl(a_line("b")).rstrip())
    assert report == InputReport(num_lines=2, model="base", errors=())


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_json_line", None),
        (b'{"a": NaN}', "invalid_json_line", None),
        (b'{"custom_id": "a", "custom_id": "b"}', "invalid_json_line", None),
        (b"[" * 100_000, "line_too_long", None),
        (b"\xff\xfe{}", "invalid_json_line", None),
        ({"method": "POST", "url": ENDPOINT, "body": {}}, "missing_required_parameter", "custom_id"),
        (LINE | {"x": 1}, "unknown_parameter", "x"),
        (LINE | {"x\ud800": 1}, "unknown_parameter", "x?"),
        (LINE | {"custom_id": ""}, "invalid_custom_id", "custom_id"),
        (LINE | {"custom_id": 7}, "invalid_custom_id", "custom_id"),
        (LINE | {"custom_id": "\ud800"}, "invalid_custom_id", "custom_id"),
        (LINE | {"method": "GET"}, "invalid_method", "method"),
        (LINE | {"url": "/v1/completions"}, "invalid_url", "url"),
        (LINE | {"body": []}, "invalid_body", "body"),
        (LINE | {"body": {}}, "missing_required_parameter", "body.model"),
        (LINE | {"body": {"model": "base", "stream": True}}, "unsupported_value", "body.stream"),
        (a_line("a", user="\ud800"), "invalid_json_line", None),
        (json.dumps(a_line("a", x=["?"])).replace('"?"', ",".join(["1E15"] * 14)).encode(), "line_too_long", "body"),
        (a_line("first"), "duplicate_custom_id", "custom_id"),
        (a_line("a", model="other"), "mismatched_model", "body.model"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(tmp_path: Path, line: Any, code: str, param: str | None) -> None:
    bad = line + b"\n" if isinstance(line, bytes) else jsonl(line)
    [error] = check(tmp_path, jsonl(a_line("first")) + b"\n" + bad + jsonl(a_line("last"))).errors
    assert (error.code, error.param, error.line) == (code, param, 3)


def test_depth_does_not_break_the_reader(tmp_path: Path) -> None:
    [error] = check(tmp_path, b"[" * 5000, max_line_bytes=10_000).errors
    assert error.code == "invalid_json_line"


def test_files_without_lines_and_with_too_many_are_refused(tmp_path: Path) -> None:
    assert [error.code for error in check(tmp_path, b"\n\n").errors] == ["empty_file"]
    report = check(tmp_path, jsonl(*(a_line(str(i)) for i in range(6))))
    assert [(error.code, error.line) for error in report.errors] == [("too_many_lines", 6)]


def test_only_so_many_mistakes_are_listed(tmp_path: Path) -> None:
    assert len(check(tmp_path, b"x\n" * 500, max_lines=1000).errors) == MAX_ERRORS


@given(st.binary(max_size=100))
def test_any_bytes_are_a_line_or_a_mistake(raw: bytes) -> None:
    with pytest.raises(BadLineError):
        parse_line(raw, ENDPOINT, max_line_bytes=50)


def test_a_failed_read_can_be_tried_again_and_skips_nothing(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\ntwo\nthree")
    reader = LineReader(str(path), 100)
    assert reader.next() == b"one\n"
    real, reader._file = reader._file, open("/proc/self/mem", "rb")  # noqa: SIM115 - reading its start is an error
    with pytest.raises(OSError, match="error"):
        reader.next()
    reader._file = real
    assert [reader.next(), reader.next(), reader.next()] == [b"two\n", b"three", None]
    assert reader.number == 3


def test_blank_lines_are_skipped_by_blocks(tmp_path: Path) -> None:
    """A file of 200 MB that had hardly anything else kept the disk's thread for minutes."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"one\n" + b"\n \r\n" * 100_000 + b"  two\n\n" + b"\n" * 5000 + b"three")
    reader = LineReader(str(path), 100)
    reader._file = file = Mock(wraps=reader._file)
    found = [(reader.next(), reader.number) for _ in range(3)]
    assert found == [(b"one\n", 1), (b"two\n", 200_002), (b"three", 205_004)]
    assert reader.next() is None
    assert len(file.mock_calls) < 200


def test_output_lines_have_openais_shape() -> None:
    assert json.loads(answered_line("batch_req_1", "a", 200, b'{"x": "\xc3\xa4"}')) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "batch_req_1", "body": {"x": "ä"}},
        "error": None,
    }
    assert json.loads(failed_line("batch_req_1", "a", "batch_expired", "Late.")) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": None,
        "error": {"code": "batch_expired", "message": "Late."},
    }
    assert json.loads(answered_line("i", "a", 200, b"<html>"))["error"]["code"] == "server_error"


def test_a_model_s_name_is_bounded() -> None:
    """One that no URL has room for could not be looked up: the batch was looked at for ever."""
    with pytest.raises(BadLineError, match="at most 256 characters") as refused:
        parse_line(json.dumps(a_line("a", model="m" * 257)).encode(), ENDPOINT, max_line_bytes=4096)
    assert (refused.value.code, refused.value.param) == ("invalid_value", "body.model")
    assert parse_line(json.dumps(a_line("a", model="m" * 256)).encode(), ENDPOINT, max_line_bytes=4096).model


def test_a_custom_id_is_bounded() -> None:
    def parsed(length: int) -> str:
        line = json.dumps(a_line("i" * length)).encode()
        return parse_line(line, ENDPOINT, max_line_bytes=4096).custom_id

    assert len(parsed(256)) == 256
    with pytest.raises(BadLineError, match="1 to 256 characters"):
        parsed(257)


def test_a_key_that_stands_twice_is_named_as_the_mistake() -> None:
    with pytest.raises(BadLineError, match="the same key twice"):
        parse_line(b'{"custom_id": "a", "custom_id": "b"}', ENDPOINT, max_line_bytes=100)


def test_a_missing_file_is_gone_only_if_its_folder_is_there(tmp_path: Path) -> None:
    """A disk that is not mounted comes back."""
    with pytest.raises(ContentGoneError):
        LineReader(str(tmp_path / "file"), 9)
    with pytest.raises(FileNotFoundError):
        LineReader(str(tmp_path / "unmounted" / "file"), 9)
