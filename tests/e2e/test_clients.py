"""What client libraries do with a running server beyond plain chats."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.contract.published import check_answer
from tests.e2e.server import Server

pytestmark = pytest.mark.e2e

BASE = "stdlib-chat"
QUESTION: list[Any] = [{"role": "user", "content": "What does os.getcwd do?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"module": {"enum": ["os", "json"]}, "depth": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["module", "depth"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "look_up", "description": "Looks a module up.", "parameters": SCHEMA, "strict": True},
    },
    {"type": "function", "function": {"name": "give_up", "description": "Return nothing."}},
]
FORCED: dict[str, Any] = {
    "model": BASE,
    "messages": QUESTION,
    "tools": TOOLS,
    "tool_choice": {"type": "function", "function": {"name": "look_up"}},
    "temperature": 0,
    "max_tokens": 200,
}


def check(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"module", "depth"}
    assert found["module"] in ("os", "json")
    assert 1 <= found["depth"] <= 9


def test_a_forced_call_is_valid_and_the_same_whole_and_streamed(client: OpenAI) -> None:
    whole = client.chat.completions.create(**FORCED).choices[0]
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    (call,) = whole.message.tool_calls or ()
    assert call.type == "function"
    check(call.function.arguments)
    with client.chat.completions.stream(**FORCED) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in events
    assert "tool_calls.function.arguments.done" in events
    assert final.finish_reason == "tool_calls"
    (streamed,) = final.message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments
    assert streamed.id != call.id


def test_required_takes_any_tool_and_none_takes_none(client: OpenAI) -> None:
    required = client.chat.completions.create(**FORCED | {"tool_choice": "required", "parallel_tool_calls": False})
    (call,) = required.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name in ("look_up", "give_up")
    for choice in ("none", "auto"):
        message = client.chat.completions.create(**FORCED | {"tool_choice": choice}).choices[0].message
        assert message.content or message.tool_calls
        assert choice == "auto" or not message.tool_calls


def test_a_call_and_its_result_go_back_to_the_model(client: OpenAI) -> None:
    call = client.chat.completions.create(**FORCED).choices[0].message
    assert call.tool_calls
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "Returns the directory."}
    answer = client.chat.completions.create(
        **FORCED | {"messages": [*QUESTION, call.model_dump(exclude_none=True), result], "tool_choice": "none"}
    )
    assert answer.choices[0].message.content


def test_a_call_that_is_cut_says_so(client: OpenAI) -> None:
    cut = client.chat.completions.create(**FORCED | {"max_tokens": 12}).choices[0]
    assert cut.finish_reason == "length"


def test_an_answer_is_parsed_into_a_model_of_the_client(client: OpenAI) -> None:
    class Verdict(BaseModel):
        sure: bool
        why: str

    parsed = client.chat.completions.parse(
        model=BASE, messages=QUESTION, response_format=Verdict, temperature=0, max_tokens=300
    )
    assert isinstance(parsed.choices[0].message.parsed, Verdict)


def test_a_final_message_is_gone_on_with(client: OpenAI) -> None:
    whole = client.chat.completions.create(model=BASE, messages=QUESTION, temperature=0).choices[0].message.content
    assert whole
    begun = [*QUESTION, {"role": "assistant", "content": whole[:19]}]
    rest = client.chat.completions.create(
        model=BASE, messages=begun, temperature=0, extra_body={"continue_final_message": True}
    )
    assert whole[:19] + (rest.choices[0].message.content or "") == whole


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools[2].function.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"extra_body": {"chat_template_kwargs": {"colour": "red"}}}, "chat_template_kwargs"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {"not": {}}}}]}
            | {"tool_choice": "auto"},
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_field(client: OpenAI, change: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**FORCED | change)
    assert refused.value.param == param


def test_an_evaluation_reads_log_likelihoods_of_batched_token_ids(server: Server) -> None:
    """As lm-evaluation-harness asks for them, and counts: the last score is that of the one token that is generated."""
    with server.http() as http:

        def post(path: str, **body: Any) -> Any:
            return http.post(path, json={"model": BASE} | body).raise_for_status().json()

        context = post("/tokenize", messages=QUESTION)["tokens"]
        asked = {"max_tokens": 60, "temperature": 0, "logprobs": 1}
        (answer,) = post("/v1/completions", prompt=context, **asked)["choices"]
        whole = post("/tokenize", prompt=answer["text"], add_special_tokens=False)["tokens"]
        # After the whole answer comes the end of sequence, after its first half another word.
        prompts = [context + whole, context + whole[: len(whole) // 2]]
        asked |= {"max_tokens": 1, "echo": True, "seed": 1234}
        told = post("/v1/completions", prompt=prompts, **asked)["choices"]
    for choice, prompt in zip(told, prompts, strict=True):
        logprobs, tops = (choice["logprobs"][name][len(context) : -1] for name in ("token_logprobs", "top_logprobs"))
        assert len(logprobs) == len(tops) == len(prompt) - len(context)
        assert logprobs == pytest.approx(answer["logprobs"]["token_logprobs"][: len(logprobs)], abs=1e-3)
        assert all(logprob == max(top.values()) for logprob, top in zip(logprobs, tops, strict=True))


def chat(**more: Any) -> tuple[str, dict[str, Any]]:
    return "chat/completions", {"messages": QUESTION, "temperature": 0, "max_tokens": 60} | more


def text(**more: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"prompt": "os.getcwd: ", "temperature": 0, "max_tokens": 6} | more


def response(**more: Any) -> tuple[str, dict[str, Any]]:
    return "responses", {"input": "What does os.getcwd do?", "temperature": 0, "max_output_tokens": 60} | more


STREAMABLE = [
    chat(n=2, logprobs=True, top_logprobs=2, service_tier="auto", metadata={"a": "b"}),
    chat(tools=TOOLS, tool_choice="required"),
    chat(response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}),
    chat(max_tokens=2, prompt_logprobs=1),
    text(n=2, logprobs=2, echo=True),
    text(prompt=[[5, 6], [7]], echo=True, max_tokens=0),
    response(include=["message.output_text.logprobs"], top_logprobs=2, instructions="Be brief."),
    response(tools=[TOOLS[0]["function"] | {"type": "function"}], tool_choice="required"),
    response(text={"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}),
    response(max_output_tokens=2),
]
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("embeddings", {"input": ["Hi", "you"]}),
    ("embeddings", {"input": [5, 6], "encoding_format": "base64"}),
    ("moderations", {"input": "Hi", "model": "omni-moderation-latest"}),
]


def test_every_answer_is_as_openai_has_published_it(server: Server) -> None:
    streamed = [(path, body | {"stream": True}) for path, body in STREAMABLE]
    counted = [(path, body | {"stream_options": {"include_usage": True}}) for path, body in streamed[:6]]
    wrong = [(path, body | {"model": model}) for path, body in STREAMABLE + WHOLE for model in ("none", 5)]
    with server.http() as http:
        for path, body in STREAMABLE + streamed + counted + WHOLE:
            answer = http.post(f"/v1/{path}", json={"model": BASE} | body)
            assert answer.status_code == 200, answer.text
            check_answer(answer)
        for path, body in wrong:
            check_answer(http.post(f"/v1/{path}", json=body))
        for path in ("models", f"models/{BASE}", "models/none", "files", "files/none", "batches", "batches/none"):
            check_answer(http.get(f"/v1/{path}"))


def test_the_server_is_well_afterwards(server: Server) -> None:
    with server.http() as http:
        assert http.get("/health").status_code == 200
