from __future__ import annotations

import json

import pytest

from loadtest.stream_client import ServedModel, StreamClient, StreamError
from loadtest.workloads import Ask, token_ask
from tests.loadtest.scripted_server import CUT, answer, frame, scripted_server

CHAT = Ask(workload="chat", path="/v1/chat/completions", body={"model": "base", "messages": []})


def test_a_whole_answer_is_timed_and_counted() -> None:
    with scripted_server() as url:
        found = StreamClient(url).ask(CHAT)
    assert found.error is None
    assert (found.status, found.finish_reason, found.model) == (200, "stop", "base")
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (10, 4, 3)
    assert len(found.event_ms) == 3, "the role is no text"
    assert 0 < found.event_ms[0] <= found.event_ms[-1] <= found.end_ms


def test_text_completions_are_read_too() -> None:
    with scripted_server() as url:
        found = StreamClient(url).ask(token_ask("base", [1, 2, 3], 3, workload="w"))
    assert found.is_ok
    assert len(found.event_ms) == 3


def test_a_stream_and_its_usage_are_asked_for() -> None:
    asked: list[dict[str, object]] = []

    def script(body: dict[str, object]) -> list[bytes]:
        asked.append(body)
        return answer(body)

    with scripted_server(script) as url:
        StreamClient(url).ask(CHAT)
    assert asked == [CHAT.body | {"stream": True, "stream_options": {"include_usage": True}}]


def test_a_connection_serves_many_requests() -> None:
    with scripted_server() as url:
        client = StreamClient(url)
        assert all(client.ask(CHAT).is_ok for _ in range(5))
        client.close()


@pytest.mark.parametrize(
    ("scripted", "status", "said"),
    [
        ((429, json.dumps({"error": {"message": "come back later"}}).encode()), 429, "HTTP 429: come back later"),
        ((500, b"Internal Server Error"), 500, "HTTP 500: Internal Server Error"),
        ([*answer(CHAT.body)[:2], CUT], 200, "HTTPParseError"),
        (answer(CHAT.body)[:-1], 200, "the stream ended without [DONE]"),
        ([frame({"error": {"message": "the model failed"}})], 200, "error event: the model failed"),
        ([b"data: {not json\n\n"], 200, "JSONDecodeError"),
    ],
)
def test_a_failure_is_recorded_as_what_it_was(
    scripted: list[bytes] | tuple[int, bytes], status: int, said: str
) -> None:
    with scripted_server(lambda _body: scripted) as url:
        found = StreamClient(url).ask(CHAT)
    assert not found.is_ok
    assert found.status == status
    assert found.error is not None
    assert said in found.error


def test_no_server_is_an_error_of_the_exchange() -> None:
    with scripted_server() as url:
        pass
    found = StreamClient(url).ask(CHAT)
    assert found.status == 0
    assert found.error is not None


def test_models_and_their_parents_are_listed() -> None:
    with scripted_server() as url:
        assert StreamClient(url).models() == [
            ServedModel(name="base", parent=None),
            ServedModel(name="capitals", parent="base"),
        ]


def test_something_else_than_a_list_of_models_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.loadtest.scripted_server.MODELS", {"hello": 1})
    with scripted_server() as url, pytest.raises(StreamError, match="list of models"):
        StreamClient(url).models()
