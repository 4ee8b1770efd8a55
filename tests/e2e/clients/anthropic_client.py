"""Anthropic's package: answers, streams, calls, results, counts and errors."""

from __future__ import annotations

import sys
from typing import Any

import anthropic
import pytest

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
QUESTION: list[Any] = [{"role": "user", "content": "What does os.getcwd do?"}]
SCHEMA = {
    "type": "object",
    "properties": {"module": {"enum": ["os", "json"]}},
    "required": ["module"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "look_up", "description": "Looks a module up.", "input_schema": SCHEMA}]
OPTIONS: dict[str, Any] = {"model": "stdlib-chat", "max_tokens": 200, "extra_body": {"temperature": 0}}
FORCED = OPTIONS | {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "look_up"}}

whole = client.messages.create(messages=QUESTION, system="Be brief.", **OPTIONS)
assert whole.stop_reason == "end_turn"
assert "working directory" in whole.content[0].text
with client.messages.stream(messages=QUESTION, system="Be brief.", **OPTIONS) as stream:
    assert "".join(stream.text_stream) == whole.content[0].text
    final = stream.get_final_message()
assert final.usage.output_tokens == whole.usage.output_tokens
num_read, num_read_later = (
    answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) for answer in (whole, final)
)
assert num_read == num_read_later
counted = client.messages.count_tokens(messages=QUESTION, system="Be brief.", model="stdlib-chat")
assert counted.input_tokens == num_read

called = client.messages.create(messages=QUESTION, **FORCED)
assert called.stop_reason == "tool_use"
(use,) = called.content
assert use.name == "look_up"
assert use.input["module"] in ("os", "json")
with client.messages.stream(messages=QUESTION, **FORCED) as stream:
    assert stream.get_final_message().content[0].input == use.input
result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "The working directory."}]}
turns = [
    *QUESTION,
    {"role": "assistant", "content": [block.model_dump() for block in called.content]},
    {"role": "user", "content": [result]},
]
answer = client.messages.create(messages=turns, **OPTIONS, tools=TOOLS, tool_choice={"type": "none"})
assert answer.content[0].type == "text"

stopped = client.messages.create(messages=QUESTION, **OPTIONS | {"stop_sequences": ["unicode"]})
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "unicode")
cut = client.messages.create(messages=QUESTION, **OPTIONS | {"max_tokens": 5})
assert cut.stop_reason == "max_tokens"
begun = [*QUESTION, {"role": "assistant", "content": "os.getcwd:"}]
assert client.messages.create(messages=begun, **OPTIONS).content[0].text.startswith(" Return")


@anthropic.beta_tool
def look_up(module: str) -> str:
    """Looks a module up."""
    return module


# It asks for a thread by itself, and goes on without where there is none.
runner = client.beta.messages.tool_runner(messages=QUESTION, tools=[look_up], **OPTIONS)
assert "working directory" in runner.until_done().content[0].text  # type: ignore[union-attr]

assert client.models.retrieve("stdlib-chat") in list(client.models.list())
shaped = {"format": {"type": "json_schema", "schema": SCHEMA}}
assert '"module"' in client.messages.create(messages=QUESTION, output_config=shaped, **OPTIONS).content[0].text

for change, error, words in (
    ({"model": "none"}, anthropic.NotFoundError, "does not exist"),
    ({"top_p": 3}, anthropic.BadRequestError, "top_p"),
    ({"stop_sequences": [""]}, anthropic.BadRequestError, "stop_sequences[0]"),
):
    body = OPTIONS | change
    extra = {name: body.pop(name) for name in list(body) if name == "top_p"}
    with pytest.raises(error) as refused:
        client.messages.create(messages=QUESTION, **body | {"extra_body": extra})
    assert refused.value.body["type"] == "error"  # type: ignore[index]
    assert words in refused.value.body["error"]["message"]  # type: ignore[index]
    assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]
