"""Responses that are stored, through the whole application: to be continued, referred to, read and deleted."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.access.tenants import KeyRing, Tenant, key_digest
from app.responses_api.asked import chat_of
from deployments.answer_events import CallDelta, EndReason, TextDelta
from deployments.errors import UnavailableError
from deployments.generation import ChatPrompt
from tests.app.batch_gateway import BatchGateway, serve
from tests.contract.published import events

RING = KeyRing(
    tenant_by_name={"blue": Tenant(name="blue"), "red": Tenant(name="red")},
    name_by_digest={key_digest("b"): "blue", key_digest("r"): "red"},
)
BLUE, RED = {"x-api-key": "b"}, {"x-api-key": "r"}
ANSWER = "Hello 🙂"
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]

Served = tuple[BatchGateway, httpx.AsyncClient]


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    gateway, client = await serve(tmp_path, RING, responses_last_s=3600)
    async with client:
        yield gateway, client


async def ask(
    http: httpx.AsyncClient, given: Any = "Hi", *, headers: dict[str, str] = BLUE, status: int = 200, **body: Any
) -> dict[str, Any]:
    """Return the response, whole or from the last event of a stream."""
    response = await http.post("/v1/responses", json={"model": "base", "input": given} | body, headers=headers)
    assert response.status_code == status, response.text
    if not body.get("stream"):
        return dict(response.json())
    *_, last = events(response.text)
    return dict(last["response"])


def turns(gateway: BatchGateway) -> list[tuple[str, str]]:
    """The turns of the prompt that was answered last."""
    prompt = gateway.requests[-1].prompt
    assert isinstance(prompt, ChatPrompt)
    return [(message.role, message.content or "") for message in prompt.messages]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_continues_another_and_what_that_continued(served: Served, stream: bool) -> None:
    gateway, http = served
    first = await ask(http, "One", instructions="Be brief.", stream=stream)
    assert (first["store"], first["previous_response_id"]) == (True, None)
    second = await ask(http, [{"role": "user", "content": "Two"}], previous_response_id=first["id"], stream=stream)
    assert (second["store"], second["previous_response_id"]) == (True, first["id"])
    # Instructions are of one request only.
    assert turns(gateway) == [("user", "One"), ("assistant", ANSWER), ("user", "Two")]
    await ask(http, "Three", previous_response_id=second["id"], instructions="Be long.", store=False)
    assert turns(gateway) == [
        ("system", "Be long."),
        ("user", "One"),
        ("assistant", ANSWER),
        ("user", "Two"),
        ("assistant", ANSWER),
        ("user", "Three"),
    ]


async def test_a_stored_response_is_what_its_client_had(served: Served) -> None:
    _, http = served
    for stream in (False, True):
        told = await ask(http, stream=stream, metadata={"a": "b"}, max_output_tokens=9)
        found = await http.get(f"/v1/responses/{told['id']}", headers=BLUE)
        assert found.json() == told


@pytest.mark.parametrize("end", [EndReason.LENGTH, EndReason.CONTENT_FILTER])
async def test_an_incomplete_response_can_be_continued(served: Served, end: EndReason) -> None:
    gateway, http = served
    gateway.end = end
    first = await ask(http)
    assert first["status"] == "incomplete"
    await ask(http, "On", previous_response_id=first["id"])
    assert [role for role, _ in turns(gateway)] == ["user", "assistant", "user"]


async def test_the_call_of_a_stored_response_gets_its_result(served: Served) -> None:
    gateway, http = served
    gateway.pieces, gateway.end = [], EndReason.TOOL_CALLS
    gateway.deltas = [TextDelta(text="", calls=(CallDelta(index=0, call_id="call_1", name="look", arguments="{}"),))]
    first = await ask(http, tools=TOOLS)
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "5"}
    for body in (
        {"given": [result], "previous_response_id": first["id"]},
        {"given": [{"role": "user", "content": "Hi"}, {"type": "item_reference", "id": call["id"]}, result]},
        # As the type of a reference may be left out.
        {"given": [{"role": "user", "content": "Hi"}, {"id": call["id"]}, result]},
    ):
        await ask(http, tools=TOOLS, **body)  # type: ignore[arg-type]
        prompt = gateway.requests[-1].prompt
        assert isinstance(prompt, ChatPrompt)
        user, assistant, tool = prompt.messages
        assert (user.content, tool.content) == ("Hi", "5")
        assert [called.name for called in assistant.tool_calls] == ["look"]


async def test_whatever_was_asked_or_answered_can_be_referred_to(served: Served) -> None:
    gateway, http = served
    answered = await ask(http, "One")
    gateway.pieces, gateway.end, gateway.refusal = [], EndReason.CONTENT_FILTER, "No."
    refused = await ask(http, [{"role": "user", "content": "Two"}])
    listed = await http.get(f"/v1/responses/{refused['id']}/input_items", headers=BLUE)
    items = answered["output"] + listed.json()["data"] + refused["output"]
    await ask(http, [{"id": item["id"]} for item in items] + [{"role": "user", "content": "Three"}])
    assert turns(gateway) == [("assistant", ANSWER), ("user", "Two"), ("assistant", "No."), ("user", "Three")]


async def test_items_are_listed_in_pages_with_what_came_before(served: Served) -> None:
    _, http = served
    first = await ask(http, "One")
    second = await ask(http, "Two", previous_response_id=first["id"])

    async def page(**query: Any) -> dict[str, Any]:
        found = await http.get(f"/v1/responses/{second['id']}/input_items", params=query, headers=BLUE)
        return dict(found.json())

    whole = await page(order="asc")
    assert [item["content"][0]["text"] for item in whole["data"]] == ["One", ANSWER, "Two"]
    assert not whole["has_more"]
    ids = [item["id"] for item in whole["data"]]
    assert [item["id"] for item in (await page())["data"]] == ids[::-1]
    newest = await page(limit=2)
    assert ([newest["first_id"], newest["last_id"]], newest["has_more"]) == (ids[:0:-1], True)
    assert [item["id"] for item in (await page(after=newest["last_id"]))["data"]] == ids[:1]
    assert (await page(after=ids[0]))["data"] == []
    assert (await page(after="msg_x"))["error"]["param"] == "after"


async def test_a_tenant_s_responses_are_nobody_else_s(served: Served) -> None:
    _, http = served
    mine = await ask(http)
    path = f"/v1/responses/{mine['id']}"
    for found in (
        await http.get(path, headers=RED),
        await http.get(f"{path}/input_items", headers=RED),
        await http.delete(path, headers=RED),
    ):
        assert (found.status_code, found.json()["error"]["code"]) == (404, "response_not_found")
    error = await ask(http, previous_response_id=mine["id"], headers=RED, status=400)
    assert error["error"]["code"] == "previous_response_not_found"
    reference = [{"type": "item_reference", "id": mine["output"][0]["id"]}]
    error = await ask(http, reference, headers=RED, status=400)
    assert (error["error"]["code"], error["error"]["param"]) == ("item_not_found", "input[0].id")
    assert (await http.get(path, headers=BLUE)).status_code == 200


async def test_a_deleted_response_is_gone(served: Served) -> None:
    _, http = served
    told = await ask(http)
    path = f"/v1/responses/{told['id']}"
    deleted = (await http.delete(path, headers=BLUE)).json()
    assert deleted == {"id": told["id"], "object": "response", "deleted": True}
    assert (await http.get(path, headers=BLUE)).status_code == 404
    error = await ask(http, previous_response_id=told["id"], status=400)
    assert error["error"]["param"] == "previous_response_id"


async def test_items_of_a_response_that_continues_a_deleted_one_are_not_found(served: Served) -> None:
    """It was a 400 about a field that the request does not have."""
    _, http = served
    first = await ask(http)
    second = await ask(http, previous_response_id=first["id"])
    await http.delete(f"/v1/responses/{first['id']}", headers=BLUE)
    path = f"/v1/responses/{second['id']}"
    assert (await http.get(path, headers=BLUE)).status_code == 200
    found = await http.get(f"{path}/input_items", headers=BLUE)
    error = found.json()["error"]
    assert (found.status_code, error["code"], error["param"]) == (404, "response_not_found", "response_id")
    assert "continues was deleted, or has expired" in error["message"]


async def test_what_shall_not_be_stored_is_not(served: Served) -> None:
    gateway, http = served
    told = await ask(http, store=False)
    assert told["store"] is False
    assert (await http.get(f"/v1/responses/{told['id']}", headers=BLUE)).status_code == 404
    gateway.error_after = RuntimeError("broken")
    failed = await ask(http, stream=True)
    assert failed["status"] == "failed"
    assert (await http.get(f"/v1/responses/{failed['id']}", headers=BLUE)).status_code == 404


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_cannot_be_stored_is_told_as_such(
    served: Served, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    gateway, http = served

    async def keep_response(kept: object) -> None:
        raise UnavailableError("away", retry_after_s=1)

    monkeypatch.setattr(gateway.batches, "keep_response", keep_response)
    told = await ask(http, stream=stream)
    assert (told["status"], told["store"]) == ("completed", False)


async def test_tokens_are_counted_with_what_came_before(served: Served) -> None:
    gateway, http = served
    first = await ask(http, "One")
    body = {"model": "base", "input": "Two", "previous_response_id": first["id"]}
    counted = await http.post("/v1/responses/input_tokens", json=body, headers=BLUE)
    assert counted.json()["input_tokens"] == len(f"One{ANSWER}Two")
    assert len(gateway.requests) == 1


async def test_a_conversation_of_too_many_items_is_refused_before_it_is_looked_at(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, http = served
    first = await ask(http, "One")
    # Two items, as 2048 messages are the bound.
    monkeypatch.setattr("app.routes.responses.ITEMS_PER_MESSAGE", 2 / 2048)
    for body, param in (
        ({"given": [{"role": "user", "content": ""}] * 3}, "input"),
        ({"given": "Two", "previous_response_id": first["id"]}, "previous_response_id"),
    ):
        error = (await ask(http, status=400, **body))["error"]  # type: ignore[arg-type]
        assert (error["param"], "at most" in error["message"]) == (param, True)


@pytest.mark.parametrize("is_reference", [False, True])
async def test_a_long_conversation_is_translated_off_the_event_loop(
    served: Served, monkeypatch: pytest.MonkeyPatch, is_reference: bool
) -> None:
    """Of a request of 89 bytes that continued 30 MB, the event loop did it for seconds."""
    threads = []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return chat_of(*args)

    _, http = served
    first = await ask(http, "One")
    monkeypatch.setattr("app.routes.responses.chat_of", noted)
    if is_reference:
        await ask(http, [{"id": first["output"][0]["id"]}])
    else:
        await ask(http, "Two", previous_response_id=first["id"])
    assert threading.main_thread() not in threads
    assert len(threads) == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": []}, "input"),
        ({"previous_response_id": "x" * 129}, "previous_response_id"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "item_reference"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": "nothing"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": f"msg_{'0' * 32}0"}]}, "input[0].id"),
        ({"input": [{"type": "item_reference", "id": f"msg_{n:032x}0"} for n in range(30)] * 40}, "input[0].id"),
    ],
)
async def test_what_is_not_there_is_told_by_its_field(served: Served, body: dict[str, Any], param: str) -> None:
    _, http = served
    response = await http.post("/v1/responses", json={"model": "base", "input": "Hi"} | body, headers=BLUE)
    assert response.status_code in (400, 413)
    if response.status_code == 400:
        assert response.json()["error"]["param"] == param


async def test_items_are_counted_from_the_first_of_the_request_itself(served: Served) -> None:
    _, http = served
    first = await ask(http)
    call = {"type": "function_call", "call_id": "1", "namespace": "n" * 40, "name": "f" * 40, "arguments": "{}"}
    error = await ask(http, [call], previous_response_id=first["id"], status=400)
    assert error["error"]["param"] == "input[0].name"


async def test_a_stored_response_is_not_streamed_again(served: Served) -> None:
    _, http = served
    told = await ask(http)
    again = await http.get(f"/v1/responses/{told['id']}", params={"stream": "true"}, headers=BLUE)
    assert (again.status_code, again.json()["error"]["param"]) == (400, "stream")


async def test_a_server_that_stores_none_says_so(tmp_path: Path) -> None:
    _, http = await serve(tmp_path, RING)
    async with http:
        assert (await ask(http))["store"] is False
        for body, param in (({"store": True}, "store"), ({"previous_response_id": "resp_1"}, "previous_response_id")):
            assert (await ask(http, status=400, **body))["error"]["param"] == param
        for path in ("/v1/responses/resp_1", "/v1/responses/resp_1/input_items"):
            refused = await http.get(path, headers=BLUE)
            assert (refused.status_code, refused.json()["error"]["code"]) == (404, "responses_not_stored")


async def test_a_reference_to_too_many_responses_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.responses_api.kept.MAX_REFERRED", 2)
    _, http = served
    for count, param, words in ((2, "input[0].id", "not found"), (3, "input", "3 responses")):
        error = await ask(http, [{"id": f"msg_{n:032x}0"} for n in range(count)], status=400)
        assert error["error"]["param"] == param
        assert words in json.dumps(error)
