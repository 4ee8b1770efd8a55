"""A response and the events that stream it: the events put together are the response."""

from __future__ import annotations

import itertools
import json
from typing import Any

import httpx
import pytest
from openai.types.responses import ParsedResponse, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from app.responses_api.answered import ResponseWriter
from app.responses_api.schemas import ResponseObject, ResponsesRequest
from app.translation.render import ResponseHead
from deployments.answer_events import CallDelta, EndReason, Finished, TextDelta, TokenScore
from engine.errors import EngineError, RequestError
from tests.app.scripted_gateway import ScriptedGateway

PATH = "/v1/responses"
GOOD: dict[str, Any] = {"model": "base", "input": "Hi"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OPEN = {"status": "in_progress", "content": [], "arguments": "", "text": "", "refusal": "", "logprobs": []}
"""What an item and its parts begin with."""
CALL = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
"""The kinds of events of a call."""


async def streamed(client: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = (await client.post(PATH, json=body | {"stream": True})).text
    events = []
    for index, frame in enumerate(text.strip().split("\n\n")):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == index
        EVENT.validate_python(event)
        events.append(event)
    for event in events:
        if "output_index" in event:
            check(event, events[-1]["response"]["output"][event["output_index"]])
    return events


def check(event: dict[str, Any], item: dict[str, Any]) -> None:
    """Compare an event with the item that it is about, as the last event has it."""
    content = item["content"][0] if "content" in item else item
    match event["type"].removeprefix("response."):
        case "output_item.added":
            assert event["item"] == {name: OPEN.get(name, value) for name, value in item.items()}
        case "output_item.done":
            assert event["item"] == item
        case "content_part.added":
            assert event["part"] == {name: OPEN.get(name, value) for name, value in content.items()}
        case "content_part.done":
            assert event["part"] == content
    if "item_id" in event:
        assert event["item_id"] == item["id"]
        assert ("content_index" in event) == ("content" in item)
    for field in {"text", "refusal", "name", "arguments"} & event.keys():
        assert event[field] == content[field]


def part(kind: str) -> list[str]:
    """The kinds of events of an item with content."""
    return ["output_item.added", "content_part.added", f"{kind}.delta", f"{kind}.done", "content_part.done", CALL[-1]]


@pytest.fixture
def calling(gateway: ScriptedGateway) -> ScriptedGateway:
    gateway.deltas = [
        TextDelta(reasoning="Hm"),
        TextDelta(reasoning=".", text="I "),
        TextDelta(text="look."),
        TextDelta(calls=(CallDelta(index=0, call_id="call_a", name="f"), CallDelta(index=0, arguments='{"a"'))),
        TextDelta(calls=(CallDelta(index=0, arguments=":1}"), CallDelta(index=1, call_id="call_b", name="g"))),
        TextDelta(calls=(CallDelta(index=1, arguments="{}"),)),
    ]
    gateway.pieces = []
    gateway.end = EndReason.TOOL_CALLS
    return gateway


async def test_a_whole_response_has_every_field_and_item(client: httpx.AsyncClient, calling: ScriptedGateway) -> None:
    answer = (await client.post(PATH, json=GOOD | {"metadata": {"a": "b"}, "instructions": "Be brief."})).json()
    ResponseObject.model_validate(answer)
    Response.model_validate(answer, strict=False)
    assert answer["status"] == "completed"
    assert answer["completed_at"] >= answer["created_at"]
    assert answer["instructions"] == "Be brief."
    assert answer["metadata"] == {"a": "b"}
    assert answer["usage"] == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 7,
    }
    thoughts, text, first, second = answer["output"]
    assert (thoughts["type"], thoughts["content"]) == ("reasoning", [{"type": "reasoning_text", "text": "Hm."}])
    assert text["content"] == [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]
    assert (first["type"], first["call_id"], first["name"], first["arguments"]) == (
        "function_call",
        "call_a",
        "f",
        '{"a":1}',
    )
    assert (second["call_id"], second["arguments"]) == ("call_b", "{}")
    assert len({item["id"] for item in answer["output"]}) == 4


async def test_a_response_tells_what_was_asked_for_and_what_holds_where_nothing_was(client: httpx.AsyncClient) -> None:
    function = {"type": "function", "name": "f", "description": "F.", "parameters": {"type": "object"}, "strict": True}
    schema = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
    said = {
        "max_output_tokens": 9,
        "parallel_tool_calls": False,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "flex",
        "temperature": 0.5,
        "text": {"format": schema},
        "tool_choice": {"type": "function", "name": "f"},
        "tools": [function],
        "top_logprobs": 2,
        "top_p": 0.5,
        "user": "u",
    }
    more = {"include": ["message.output_text.logprobs"], "reasoning": {"effort": "low"}}
    answer = (await client.post(PATH, json=GOOD | said | more)).json()
    assert {name: answer[name] for name in said} == said
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    bare = {"type": "function", "name": "f"}
    plain = (await client.post(PATH, json=GOOD | {"service_tier": "auto", "tools": [bare]})).json()
    assert {name: plain[name] for name in (*said, "reasoning", "metadata")} == dict.fromkeys(said) | {
        "metadata": {},
        "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None},
        "service_tier": "default",
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [bare | {"description": None, "parameters": None, "strict": False}],
        "top_logprobs": 0,
    }


def test_a_response_is_completed_once() -> None:
    """What is stored is what its client gets a moment later."""
    head = ResponseHead(response_id="resp_1", created_s=1, model="base")
    body, ticks = ResponsesRequest.model_validate(GOOD), itertools.count(2)
    writer = ResponseWriter(body, head, tells_scores=False, unix_s=lambda: next(ticks))
    finished = Finished(reason=EndReason.STOP, num_prompt_tokens=1, num_completion_tokens=0, num_cached_tokens=0)
    assert [writer.response([], finished).completed_at for _ in range(2)] == [2, 2]


async def test_a_stream_ends_with_what_its_events_have_built(
    client: httpx.AsyncClient, calling: ScriptedGateway
) -> None:
    events = await streamed(client, GOOD)
    kinds = [kind for kind, _ in itertools.groupby(event["type"].removeprefix("response.") for event in events)]
    assert kinds == ["created", "in_progress", *part("reasoning_text"), *part("output_text"), *CALL, *CALL, "completed"]
    assert events[0]["response"]["status"] == "in_progress"
    final = events[-1]["response"]
    built = {
        kind: "".join(event["delta"] for event in events if event["type"] == f"response.{kind}.delta")
        for kind in ("reasoning_text", "output_text", "function_call_arguments")
    }
    assert built == {
        "reasoning_text": "Hm.",
        "output_text": "I look.",
        "function_call_arguments": '{"a":1}{}',
    }
    opened = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert opened == [0, 1, 2, 3]
    whole = (await client.post(PATH, json=GOOD)).json()
    assert [strip(item) for item in whole["output"]] == [strip(item) for item in final["output"]]


def strip(item: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in item.items() if name != "id"}


@pytest.mark.parametrize(("end", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
async def test_a_response_that_was_cut_is_incomplete(
    client: httpx.AsyncClient, gateway: ScriptedGateway, end: str, reason: str
) -> None:
    gateway.end = EndReason(end)
    answer = (await client.post(PATH, json=GOOD)).json()
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": reason})
    assert answer["completed_at"] is None
    events = await streamed(client, GOOD)
    assert events[-1]["type"] == "response.incomplete"
    (done,) = (event["item"] for event in events if event["type"] == "response.output_item.done")
    assert done["status"] == "incomplete"
    assert events[-1]["response"]["output"] == [done]


async def test_only_the_last_item_of_an_answer_that_was_cut_is_incomplete(
    client: httpx.AsyncClient, calling: ScriptedGateway
) -> None:
    calling.end = EndReason.LENGTH
    statuses = ["completed", "completed", "completed", "incomplete"]
    assert [item["status"] for item in (await client.post(PATH, json=GOOD)).json()["output"]] == statuses
    events = await streamed(client, GOOD)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == statuses
    assert events[-1]["response"]["output"] == done


@pytest.mark.parametrize(("num_deltas", "status"), [(5, "incomplete"), (6, "completed")])
async def test_a_call_that_a_stop_string_cuts_is_incomplete(
    client: httpx.AsyncClient, calling: ScriptedGateway, num_deltas: int, status: str
) -> None:
    calling.deltas, calling.end = calling.deltas[:num_deltas], EndReason.STOP
    answer = (await client.post(PATH, json=GOOD)).json()
    statuses = ["completed", "completed", "completed", status]
    assert [item["status"] for item in answer["output"]] == statuses
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    events = await streamed(client, GOOD)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["status"] for item in done] == statuses
    assert events[-1]["response"]["output"] == done


async def test_a_refused_input_is_a_refusal(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    gateway.pieces, gateway.end, gateway.refusal = [], EndReason.CONTENT_FILTER, "No."
    answer = (await client.post(PATH, json=GOOD)).json()
    assert answer["output"][0]["content"] == [{"type": "refusal", "refusal": "No."}]
    events = await streamed(client, GOOD)
    told = {event["type"].removeprefix("response."): event for event in events}
    assert list(told) == ["created", "in_progress", *part("refusal"), "incomplete"]
    assert told["refusal.delta"]["delta"] == "No."


async def test_a_failure_in_mid_stream_is_an_error_and_a_failed_response(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.error_after = EngineError("secret")
    *_, error, failed = await streamed(client, GOOD)
    assert error["type"] == "error"
    assert "secret" not in json.dumps([error, failed])
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert error["code"] == failed["response"]["error"]["code"] == "server_error"


async def test_an_error_of_the_client_s_in_mid_stream_names_its_field_and_blames_the_prompt(
    client: httpx.AsyncClient, gateway: ScriptedGateway
) -> None:
    gateway.error_after = RequestError("'response_format' fits nothing.", field="response_format")
    *_, error, failed = await streamed(client, GOOD)
    assert (error["param"], error["message"]) == ("text.format", "'text.format' fits nothing.")
    assert error["code"] == failed["response"]["error"]["code"] == "invalid_prompt"


async def test_parsed_items_may_come_back_with_what_was_parsed(
    client: httpx.AsyncClient, calling: ScriptedGateway
) -> None:
    """OpenAI's `parse` adds it, its package for JavaScript sends it, and the turn after the first call was a 400."""
    answer = (await client.post(PATH, json=GOOD)).json()
    for item in answer["output"]:
        if item["type"] == "function_call":
            item["parsed_arguments"] = json.loads(item["arguments"])
        elif item["type"] == "message":
            item["content"][0]["parsed"] = {"a": 1}
    items = (
        ParsedResponse[Any].model_validate(answer, strict=False).model_dump(mode="json", exclude_unset=True)["output"]
    )
    assert items == answer["output"]
    results = [{"type": "function_call_output", "call_id": call_id, "output": "5"} for call_id in ("call_a", "call_b")]
    body = GOOD | {"input": [{"role": "user", "content": "Hi"}, *items, *results]}
    assert (await client.post(PATH, json=body)).status_code == 200
    assert [call.arguments for call in calling.requests[1].prompt.messages[1].tool_calls] == ['{"a":1}', "{}"]  # type: ignore[union-attr]


async def test_scores_are_told_where_they_are_included(client: httpx.AsyncClient, gateway: ScriptedGateway) -> None:
    body = GOOD | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (item,) = (await client.post(PATH, json=body)).json()["output"]
    assert [score["token"] for score in item["content"][0]["logprobs"]] == gateway.pieces
    events = await streamed(client, body)
    told = [score["token"] for event in events if "delta" in event for score in event["logprobs"]]
    assert told == gateway.pieces


@pytest.mark.parametrize("num_at_once", [1, 2, 12])
async def test_scores_are_those_of_the_text_alone_streamed_or_not(
    client: httpx.AsyncClient, gateway: ScriptedGateway, num_at_once: int
) -> None:
    """A whole response told those of thoughts and calls too, a stream those of thoughts and of no call."""
    call = CallDelta(index=0, call_id="call_a", name="f", arguments="{}")
    tokens = (
        ("<think>", {}), ("Hm", {"reasoning": "Hm"}), (".", {"reasoning": "."}), ("</think>", {}), ("\n", {}),
        ("I", {"text": "I"}), (" ", {}), ("see", {"text": " see"}), (".", {"text": "."}), (" ", {}),
        ("<call>f", {}), ("{}", {"calls": (call,)}),
    )  # fmt: skip
    told = []
    for place, (text, found) in enumerate(tokens):
        score = TokenScore(place, text, text.encode(), -0.5)
        of_text = (score,) if 5 <= place < 9 else ()
        told.append(TextDelta(**found, scores=(score,), text_scores=of_text))  # type: ignore[arg-type]
    batches = (told[place : place + num_at_once] for place in range(0, len(told), num_at_once))
    gateway.deltas = [joined(batch) for batch in batches]
    gateway.pieces = []
    body = GOOD | {"include": ["message.output_text.logprobs"]}
    for output in (
        (await client.post(PATH, json=body)).json()["output"],
        (await streamed(client, body))[-1]["response"]["output"],
    ):
        (part,) = output[1]["content"]
        assert part["text"] == "I see."
        assert [score["token"] for score in part["logprobs"]] == ["I", " ", "see", "."]


def joined(deltas: list[TextDelta]) -> TextDelta:
    return TextDelta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(call for delta in deltas for call in delta.calls),
        scores=tuple(score for delta in deltas for score in delta.scores),
        text_scores=tuple(score for delta in deltas for score in delta.text_scores),
    )
