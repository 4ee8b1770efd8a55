"""langchain-openai: an answer, a stream, structured output by schema and by call, and the Responses API."""

from __future__ import annotations

import sys
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What does os.getcwd do?"


class Module(BaseModel):
    """Where something is found."""

    module: Literal["os", "json"]
    sure: bool


@tool
def look_up(module: Literal["os", "json"]) -> str:
    """Look a module up."""
    return module


model = ChatOpenAI(
    model="stdlib-chat", base_url=f"{sys.argv[1]}/v1", api_key="unused", temperature=0, max_retries=0, max_tokens=200
)
answer = model.invoke(QUESTION)
assert "working directory" in answer.content
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in model.stream(QUESTION)) == answer.content
for method in ("json_schema", "function_calling"):
    assert isinstance(model.with_structured_output(Module, method=method).invoke(QUESTION), Module)
(call,) = model.bind_tools([look_up], tool_choice="look_up").invoke(QUESTION).tool_calls
assert call["name"] == "look_up"
assert call["args"]["module"] in ("os", "json")
responses = ChatOpenAI(
    model="stdlib-chat", base_url=f"{sys.argv[1]}/v1", api_key="unused", temperature=0, use_responses_api=True
)
assert responses.invoke(QUESTION).text == answer.content
assert "".join(chunk.text for chunk in responses.stream(QUESTION)) == answer.content
