from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.http.errors import ApiError, is_our_fault, retry_after, to_api_error, without_internals
from engine.errors import EngineError, FailedAloneError, OverloadError, RequestError


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (RequestError("a", field="n"), 400, None),
        (RequestError("a", field="model", code="model_not_found"), 404, "model_not_found"),
        (RequestError("a", code="context_length_exceeded"), 400, "context_length_exceeded"),
        (OverloadError("a", retry_after_s=0.01), 503, "server_overloaded"),
        (TimeoutError(), 504, "timeout"),
        (EngineError("a"), 500, None),
        (FailedAloneError("a"), 500, None),
        (RecursionError(), 500, None),
        (ApiError(418, "a", code="b"), 418, "b"),
    ],
)
def test_every_error_has_one_status(error: Exception, status: int, code: str | None) -> None:
    answer = to_api_error(error)
    assert (answer.status, answer.code) == (status, code)
    assert is_our_fault(error) is (status == 500 and not isinstance(error, FailedAloneError))


def test_what_failed_alone_is_told_and_what_is_amiss_in_the_engine_is_not() -> None:
    sentence = "Adapter 'sql' cannot be used: the files of this version have been overwritten."
    assert to_api_error(FailedAloneError(sentence)).message == sentence
    assert to_api_error(FailedAloneError("in /opt/x.py")).message == "in [path]"
    assert "secret" not in to_api_error(EngineError("secret")).message


@given(wait_s=st.floats(0, 1e9))
def test_the_wait_is_whole_seconds_that_the_sdk_accepts_and_never_too_short(wait_s: float) -> None:
    told = int(to_api_error(OverloadError("a", retry_after_s=wait_s)).headers["retry-after"])
    assert max(1, min(wait_s, 120)) <= told <= 120
    assert told <= 2 + 1.25 * (wait_s + 1)


@pytest.mark.parametrize("error", [OverloadError("a", retry_after_s=3.0, is_final=True), FailedAloneError("a")])
def test_who_would_be_refused_again_is_told_so_and_no_time(error: Exception) -> None:
    """OpenAI's SDKs waited for two minutes to ask for the same once more; for a broken adapter, they asked thrice."""
    assert to_api_error(error).headers == {"x-should-retry": "false"}
    assert to_api_error(EngineError("a")).headers == {}


def test_who_is_refused_together_is_not_told_to_come_back_together() -> None:
    assert {retry_after(20.0) for _ in range(1000)} == set(range(20, 26))
    assert {retry_after(8.0) for _ in range(1000)} == set(range(8, 12))
    assert {retry_after(0.01) for _ in range(100)} == {1, 2}


def test_addresses_and_paths_are_taken_out_and_routes_in_quotes_are_text() -> None:
    assert without_internals("at 0x7fFe in /usr/lib/x.py") == "at [address] in [path]"
    assert without_internals("use /v1/completions, not /v2/x") == "use /v1/completions, not [path]"
    assert without_internals("600 of 512 tokens, and/or less") == "600 of 512 tokens, and/or less"


def test_a_body_can_always_be_encoded() -> None:
    body = ApiError(400, "\ud800" + "x" * 5000, param="\udfff").body()
    assert len(json.dumps(body, ensure_ascii=False).encode()) < 2000
