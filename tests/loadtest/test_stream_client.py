from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator

import gevent  # type: ignore[import-untyped, unused-ignore]
import pytest
from geventhttpclient import HTTPClient  # type: ignore[import-untyped, unused-ignore]
from geventhttpclient.response import HTTPSocketPoolResponse  # type: ignore[import-untyped, unused-ignore]
from hypothesis import given
from hypothesis import strategies as st

from loadtest.stream_client import EventLines, ServedModel, StreamClient, StreamError
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
        ([b"data: null\n\n"], 200, "no JSON object: null"),
        ([b"data: [1]\n\n"], 200, "no JSON object: [1]"),
        ([frame({"choices": [1]})], 200, "AttributeError"),
        ([frame({"choices": 3})], 200, "TypeError"),
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


def test_fields_that_are_null_are_as_good_as_absent() -> None:
    usage = {"prompt_tokens": None, "completion_tokens": None, "prompt_tokens_details": None}
    pieces = [
        frame({"error": None, "choices": [{"delta": {"content": "word"}}], "usage": None}),
        frame({"choices": [{"delta": None, "finish_reason": "stop"}]}),
        frame({"choices": None, "usage": usage}),
        b"data: [DONE]\n\n",
    ]
    with scripted_server(lambda _body: pieces) as url:
        found = StreamClient(url).ask(CHAT)
    assert found.error is None
    assert (found.prompt_tokens, found.cached_tokens, found.completion_tokens) == (0, 0, 1)


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_the_thoughts_of_a_model_are_text(field: str) -> None:
    """The server counts their tokens; the time per token was that of the rest of the answer, divided by all tokens."""
    deltas = [{field: "so "}, {field: "thus "}, {"content": "word"}]
    pieces = [frame({"choices": [{"delta": delta}]}) for delta in deltas]
    with scripted_server(lambda _body: [*pieces, b"data: [DONE]\n\n"]) as url:
        assert len(StreamClient(url).ask(CHAT).event_ms) == 3


def test_an_answer_ends_with_its_end_mark_and_not_with_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    read = HTTPSocketPoolResponse.read

    def read_late(response: HTTPSocketPoolResponse) -> bytes:
        nonlocal now_s
        now_s = 100.0
        return bytes(read(response))

    monkeypatch.setattr(HTTPSocketPoolResponse, "read", read_late)
    monkeypatch.setattr("loadtest.stream_client.time.perf_counter", lambda: now_s)
    with scripted_server() as url:
        found = StreamClient(url).ask(CHAT)
    assert now_s == 100, "what follows the mark has been read"
    assert found.end_ms == 0


def test_what_is_unanswered_at_the_end_of_a_test_is_an_error_and_does_not_vanish() -> None:
    is_over = threading.Event()

    def script(body: dict[str, object]) -> Iterator[bytes]:
        yield answer(body)[1]
        is_over.wait(30)

    with scripted_server(script) as url:
        asking = gevent.spawn(StreamClient(url).ask, CHAT, on_first_text=lambda: gevent.spawn(gevent.kill, asking))
        found = asking.get(timeout=30)
        is_over.set()
    assert (found.status, len(found.event_ms), found.error) == (200, 1, "unanswered when the test ended")


def test_no_server_is_an_error_of_the_exchange() -> None:
    with scripted_server() as url:
        pass
    found = StreamClient(url).ask(CHAT)
    assert found.status == 0
    assert found.error is not None


def test_a_server_below_a_path_is_asked_there() -> None:
    """The path was dropped in silence, and another server asked."""
    with scripted_server() as url:
        found = StreamClient(f"{url}/below").ask(CHAT)
    assert found.error is not None
    assert "/below/v1/chat/completions" in found.error


def test_something_that_is_not_http_is_said() -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def greet() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"220 post office\r\n")
            connection.recv(1)

    thread = threading.Thread(target=greet)
    thread.start()
    with listener, pytest.raises(StreamError, match="list of models"):
        StreamClient(f"http://127.0.0.1:{listener.getsockname()[1]}").models()
    thread.join()


def test_a_certificate_that_is_not_trusted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its error is a ValueError as well, as that of an answer that is no list of models."""
    client = StreamClient("https://localhost:1")

    def refuse(*_arguments: object) -> None:
        raise ssl.SSLCertVerificationError("self-signed certificate")

    monkeypatch.setattr(HTTPClient, "get", refuse)
    with pytest.raises(OSError, match="self-signed"):
        client.models()


def test_a_request_that_is_not_streamed_fails_with_the_server_s_words() -> None:
    with scripted_server(lambda _: (403, b'{"error": {"message": "not from there"}}'), key="k") as url:
        with pytest.raises(StreamError, match="POST /v1/x: HTTP 403: not from there"):
            StreamClient(url, api_key="k").post("/v1/x", {})
        with pytest.raises(StreamError, match="HTTP 401: who are you"):
            StreamClient(url).post("/v1/x", {})
    with scripted_server(lambda _: (200, b"fine")) as url:
        StreamClient(url).post("/v1/x", {})


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


def payloads(stream: bytes) -> list[str]:
    lines = EventLines()
    return [payload for line in stream.splitlines(keepends=True) if (payload := lines.feed(line)) is not None]


def test_an_event_ends_with_its_blank_line() -> None:
    assert payloads(b"data: a\n\ndata: b\n\n") == ["a", "b"]
    assert payloads(b"data: a\r\n\r\n") == ["a"]


def test_an_event_that_is_not_closed_is_dropped() -> None:
    assert payloads(b"data: a\n\ndata: b\n") == ["a"]


def test_lines_of_one_event_are_joined_and_other_fields_ignored() -> None:
    assert payloads(b": ping\nevent: x\nid: 1\ndata: a\ndata:b\nretry: 5\n\n: only a comment\n\n") == ["a\nb"]


def test_one_leading_space_belongs_to_the_format() -> None:
    assert payloads(b"data:  a \n\n") == [" a "]


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\n\r", exclude_categories=["Cs"]))))
def test_what_a_server_frames_comes_out(texts: list[str]) -> None:
    lines = EventLines()
    found = []
    for text in texts:
        found += [lines.feed(f"data: {text}\n".encode()), lines.feed(b"\n")]
    assert [payload for payload in found if payload is not None] == texts
