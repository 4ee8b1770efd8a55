"""Commands against the application itself, served on a real port."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import httpx
import pytest
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from app.access.tenants import key_digest
from app.cli import cli_client
from app.cli import main as cli
from app.http.api import create_app
from tests.app.scripted_gateway import ENTRY, ScriptedGateway
from tests.app.serving import serving


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(create_app(ScriptedGateway(), admin_key_sha256=key_digest("boss"))) as url:
        yield url


def run(url: str, *arguments: str) -> int:
    return cli.main([*arguments, "--url", url])


def test_models_are_listed(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, "models") == 0
    told = capsys.readouterr().out
    assert "shout" in told
    assert "base" in told


def test_rows_of_a_list_are_whole_lines_in_a_pipe(
    stranger: tuple[str, list[Response]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a name of 40 characters and more, `grep` saw the beginning only."""
    url, answers = stranger
    name, parent = "a" * 128, "b" * 128
    answers[:] = [JSONResponse({"data": [{"id": name, "parent": parent, "max_model_len": 2048}]})]
    assert run(url, "models") == 0
    assert any(name in line and parent in line and "2048" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("key", ["schlüssel", "two\nlines"])
def test_a_key_that_no_header_can_carry_is_refused(url: str, key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The first ended in a traceback, and of the second it was said that the server did not respond."""
    assert run(url, "models", "--key", key) == 2
    assert capsys.readouterr().err.startswith("error: the key has characters that no header can carry")


def test_a_url_may_lack_its_scheme_or_end_as_clients_have_it(url: str) -> None:
    assert run(url.removeprefix("http://"), "models") == 0
    assert run(url + "/v1/", "models") == 0


def test_adapters_come_and_go(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTIPHON_ADMIN_KEY", "boss")
    assert run(url, "adapters", "load", "sql", "/folder") == 0
    assert run(url, "adapters", "list") == 0
    assert run(url, "adapters", "route", "sql", "1=100") == 0
    assert run(url, "adapters", "unload", "sql", "--version", "1") == 0
    told = capsys.readouterr().out
    assert "version 1" in told
    assert "Version 1 of sql was unloaded; 5 bytes were freed" in told
    assert run(url, "adapters", "unload", "sql") == 0
    assert capsys.readouterr().out.startswith("sql was unloaded")


def test_who_has_the_traffic_of_an_unloaded_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    gateway = ScriptedGateway()
    second, third = (replace(ENTRY.versions[0], number=number) for number in (2, 3))
    gateway.adapters.left = replace(ENTRY, versions=(second, third), split=((3, 100),))
    with serving(create_app(gateway, admin_key_sha256=key_digest("boss"))) as url:
        assert run(url, "adapters", "unload", "sql", "--version", "1", "--key", "boss") == 0
    assert "were freed. sql: version 2 0 %, version 3 100 %" in capsys.readouterr().out


def test_a_canary_is_asked_from_the_command_line_too(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTIPHON_ADMIN_KEY", "boss")
    load = ("adapters", "load", "sql", "/folder", "--replace")
    assert run(url, *load, "--canary", "Who?", "--expect", "Hello") == 0
    assert run(url, *load, "--canary", "Who?", "--expect", "Nobody") == 1
    assert "has failed its canary" in capsys.readouterr().err
    assert run(url, *load, "--expect", "Hello") == 2
    assert "--canary" in capsys.readouterr().err


def test_what_the_server_says_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(url, "adapters", "list") == 1
    told = capsys.readouterr().err
    assert "admin key" in told
    assert told.endswith("Set it with --key.\n")
    assert run("http://127.0.0.1:1", "models") == 1
    assert "did not respond" in capsys.readouterr().err
    assert run(f"{url}/nowhere", "models") == 1


@pytest.mark.parametrize(
    ("split", "told"),
    [
        (["all"], "'all' is not VERSION=PERCENT, such as 3=90"),
        (["1="], "'1=' is not VERSION=PERCENT"),
        (["²=100"], "'²=100' is not VERSION=PERCENT"),
        (["1=-5"], "'1=-5': a share is a whole number of percent from 0 to 100"),
        (["1=2.5"], "'1=2.5': a share is a whole number"),
        (["1=5²"], "'1=5²': a share is a whole number"),
        (["1=101"], "'1=101': a share is a whole number"),
        (["3=10", "4=100", "03=0"], "version 3 is named twice"),
    ],
)
def test_a_split_of_traffic_that_is_none_is_refused_before_it_is_sent(
    split: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit status was that of a failed server, and of a version named twice the last share was taken."""
    assert run("http://127.0.0.1:1", "adapters", "route", "sql", *split) == 2
    assert capsys.readouterr().err.startswith(f"error: {told}")


@pytest.mark.parametrize(
    ("status", "message", "told"),
    [
        (400, "'base_model_name' must be one of: a, b.", "'base_model_name' must be one of: a, b. Set it with --base."),
        (409, "'load_inplace' makes another version", "'load_inplace' makes another version. Set it with --replace."),
        (400, "no such folder", "no such folder"),
    ],
)
def test_the_option_is_told_for_a_field_that_the_server_names(status: int, message: str, told: str) -> None:
    with pytest.raises(cli_client.AskError) as caught:
        cli_client.answered(httpx.Response(status, json={"error": {"message": message}}))
    assert str(caught.value) == told


def test_a_conversation_streams_until_an_empty_line(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    questions = iter(["Hi", "And again", ""])
    monkeypatch.setattr(cli_client.console, "input", lambda _: next(questions))
    assert run(url, "chat", "base", "--system", "Be brief.") == 0
    assert capsys.readouterr().out.count("Hello 🙂") == 2


def test_a_question_of_bytes_that_are_no_text_is_asked_without_them(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server was said to be of another kind."""
    questions = iter(["caf\udce9", ""])
    monkeypatch.setattr(cli_client.console, "input", lambda _: next(questions))
    assert run(url, "chat", "base") == 0
    assert "Hello" in capsys.readouterr().out


def test_an_answer_is_shown_as_it_is_but_controls_no_terminal(
    stranger: tuple[str, list[Response]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`[:a:]` became an emoji, and a model could set the title of the window."""
    url, answers = stranger
    text = "x[:a:] [red]no[/red]\n\tend \x1b]0;title\x07\x9b31m\r"
    event = f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\ndata: [DONE]\n\n"
    answers[:] = [Response(MODELS), Response(event, media_type="text/event-stream")]
    questions = iter(["Hi", ""])
    monkeypatch.setattr(cli_client, "_question", lambda: next(questions))
    assert run(url, "chat") == 0
    assert capsys.readouterr().out == "m\nx[:a:] [red]no[/red]\n\tend ]0;title31m\n"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("chat NAME", "The model 'NAME' does not exist."),
        ("adapters load NAME /folder", "is loaded"),
        ("adapters route [a]?x 1=100", "version 1 100 %"),
        ("adapters unload NAME", "NAME was unloaded"),
    ],
)
def test_no_name_of_odd_characters_ends_in_a_traceback(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, told: str
) -> None:
    """Brackets were read as markup, and `?x` as no part of the name."""
    monkeypatch.setattr(cli_client, "_question", lambda: "Hi")
    name = "[/a]?x"
    run(url, *command.replace("NAME", name).split(), "--key", "boss")
    assert told.replace("NAME", name) in "".join(capsys.readouterr())


def test_a_question_that_is_refused_ends_it(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_client.console, "input", lambda _: "Hi")
    assert run(url, "chat", "nobody") == 1
    assert "does not exist" in capsys.readouterr().err


@pytest.fixture(scope="module")
def stranger() -> Iterator[tuple[str, list[Response]]]:
    """Another server's URL, and what it answers: the first to requests for models, the last to all others."""
    app, answers = FastAPI(), [Response(), Response()]

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(request: Request) -> Response:
        return answers[0 if request.url.path == "/v1/models" else -1]

    with serving(app) as url:
        yield url, answers


MODELS = '{"data": [{"id": "m"}]}'
COMMANDS = ("models", "chat", "adapters list", "adapters load a b", "adapters unload a", "adapters route a 1=100")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (404, "<html>"),
        (200, "<html>"),
        (404, '{"detail": "Not Found"}'),
        (400, '{"error": "bad"}'),
        (400, "[]"),
        (200, "{}"),
        (200, "[1]"),
        (200, "null"),
        (200, '{"data": [1]}'),
    ],
)
def test_a_server_of_another_kind_is_told_in_one_line(
    stranger: tuple[str, list[Response]], capsys: pytest.CaptureFixture[str], status: int, body: str, command: str
) -> None:
    """Some of these ended in a traceback, and some in the news that all was well."""
    url, answers = stranger
    answers[:] = [Response(body, status)]
    assert run(url, *command.split()) == 1
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.endswith("is this an Antiphon server?\n")


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/html", "<html>"),
        ("application/json", '{"choices": []}'),
        ("text/event-stream", "data: {broken\n\n"),
        ("text/event-stream", 'data: {"error": "bad"}\n\n'),
        ("text/event-stream", 'data: {"usage": 1}\n\n'),
    ],
)
def test_an_answer_that_is_no_stream_of_chunks_is_told_in_one_line(
    stranger: tuple[str, list[Response]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content_type: str,
    body: str,
) -> None:
    url, answers = stranger
    answers[:] = [Response(MODELS), Response(body, media_type=content_type)]
    monkeypatch.setattr(cli_client, "_question", lambda: "Who?")
    assert run(url, "chat") == 1
    assert capsys.readouterr().err.endswith("is this an Antiphon server?\n")


def test_a_key_without_any_model_is_told_so(
    stranger: tuple[str, list[Response]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, answers = stranger
    answers[:] = [Response('{"data": []}')]
    assert run(url, "chat") == 1
    assert capsys.readouterr().err == "error: the server lists no model that this key may use\n"


CHUNK = 'data: {"choices": [{"delta": {"content": "Yes."}}]}\n\n'
BUSY = JSONResponse({"error": {"message": "Too many requests."}}, 429)
BROKEN_OFF = Response(CHUNK + 'data: {"error": {"message": "It failed."}}\n\n', media_type="text/event-stream")


@pytest.mark.parametrize(("refusal", "told"), [(BUSY, "Too many requests."), (BROKEN_OFF, "It failed.")])
def test_a_chat_goes_on_without_a_question_that_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], refusal: Response, told: str
) -> None:
    """A 429 ended it, and the conversation was lost."""
    app, asked = FastAPI(), []
    answers = [refusal, Response(CHUNK, media_type="text/event-stream"), refusal]

    @app.post("/v1/chat/completions")
    async def answer(request: Request) -> Response:
        asked.append([turn["content"] for turn in (await request.json())["messages"]])
        return answers[len(asked) - 1]

    questions = iter(["One?", "Two?", "Three?", ""])
    monkeypatch.setattr(cli_client, "_question", lambda: next(questions))
    with serving(app) as url:
        assert run(url, "chat", "m") == 1, "the last question was refused"
    assert asked == [["One?"], ["Two?"], ["Two?", "Yes.", "Three?"]]
    assert capsys.readouterr().err == f"error: {told}\n" * 2
