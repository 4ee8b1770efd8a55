from __future__ import annotations

from typing import Any

import pytest

from app.responses_api.asked import chat_of
from app.responses_api.kept import MAX_PARTS, own_items
from app.responses_api.schemas import InputItem, ResponsesRequest

ITEMS: list[dict[str, Any]] = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}, {"type": "input_text", "text": "!"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "Hm."}],
        "encrypted_content": None,
    },
    {"role": "assistant", "content": "I look.", "phase": None},
    {"type": "function_call", "call_id": "1", "name": "f", "namespace": "n", "arguments": "{}", "parsed_arguments": {}},
    {"type": "function_call_output", "call_id": "1", "output": "5"},
    {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
]
RESPONSE = "resp_" + "0" * 32


def request(given: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "m", "input": given})


@pytest.mark.parametrize("given", ["Hi", "", ITEMS], ids=["text", "empty text", "items"])
def test_what_is_stored_of_an_input_is_the_same_chat(given: Any) -> None:
    stored = own_items(request(given).input, RESPONSE)
    assert chat_of(request(stored)) == chat_of(request(given))
    read = [InputItem.model_validate(item) for item in stored]
    assert chat_of(request("On"), read).messages[:-1] == chat_of(request(given)).messages
    assert own_items(read, RESPONSE) == stored


def test_many_parts_are_stored_as_one_and_empty_ones_not_at_all() -> None:
    """Each part was an object of every request that continues the response, though it held no character."""
    nothing = {"type": "input_text", "text": ""}
    few = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    many = [{"type": "refusal", "refusal": "a"}, *({"type": "output_text", "text": "b"} for _ in range(MAX_PARTS))]
    given = [
        {"role": "user", "content": [*[nothing] * 50, *few, *[nothing] * 50]},
        {"role": "user", "content": [nothing] * 50},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "c"}] * 50},
        {"role": "assistant", "content": many},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": [nothing, *few]},
    ]
    stored = own_items(request(given).input, RESPONSE)
    assert chat_of(request(stored)) == chat_of(request(given))
    user, empty, thoughts, assistant, _, output = stored
    assert (user["content"], empty["content"], output["output"]) == (few, [nothing], few)
    assert thoughts["summary"] == [{"type": "summary_text", "text": "c" * 50}]
    assert assistant["content"] == [{"type": "refusal", "refusal": "a" + "b" * MAX_PARTS}]


def test_what_parse_helpers_add_is_not_stored_however_deep_it_is() -> None:
    """Of what was too deep no JSON could be written, and a finished answer was a 500."""
    deep: Any = 1
    for _ in range(300):
        deep = [deep]
    part = {"type": "output_text", "text": "x", "parsed": deep, "logprobs": [{"a": deep}]}
    call = ITEMS[4] | {"parsed_arguments": deep}
    message, stored = own_items(request([{"role": "assistant", "content": [part]}, call]).input, RESPONSE)
    assert message["content"] == [{"type": "output_text", "text": "x"}]
    assert "parsed_arguments" not in stored


def test_items_have_the_ids_and_parts_of_openai_s() -> None:
    stored = own_items(request(ITEMS).input, RESPONSE)
    identity = RESPONSE.removeprefix("resp_")
    kinds = ["msg", "msg", "rs", "msg", "fc", "fco", "msg"]
    assert [item["id"] for item in stored] == [f"{kind}_{identity}i{index}" for index, kind in enumerate(kinds)]
    assert stored[0] == {
        "id": f"msg_{identity}i0",
        "type": "message",
        "role": "developer",
        "status": "completed",
        "content": [{"type": "input_text", "text": "Be brief."}],
    }
    assert stored[3]["content"] == [{"type": "output_text", "text": "I look."}]
