"""Tools of a chat: the functions that the model may call, which of them it has to, and the calls that it made."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError, PydanticKnownError

from app.schemas.structured import JsonSchema
from app.schemas.wire import ASKS_NOTHING, WireRequest, WireResponse, checked_type, missing

MAX_EARLIER_CALLS = 128
"""Calls in one earlier turn of the assistant."""
MAX_TOOLS = 4096
"""More are not looked at one by one: `limits.max_tools`, which is checked later, cannot be higher."""
PARSED = "Sent back by OpenAI's parse helpers; no effect."
FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


def _only_functions() -> Any:
    return checked_type("custom".__eq__, "this server does not support custom tools, only functions")


def not_too_many(tools: Any) -> Any:
    """Refuse more tools than any configuration allows, those of all namespaces together included.

    Not by `max_length`, which looks at all items where the first ones are wrong.
    """
    if not isinstance(tools, list):
        return tools
    inner = [tool["tools"] for tool in tools if isinstance(tool, dict) and isinstance(tool.get("tools"), list)]
    count = max(len(tools), sum(map(len, inner)))
    if count > MAX_TOOLS:
        raise PydanticKnownError("too_long", {"field_type": "List", "max_length": MAX_TOOLS, "actual_length": count})
    return tools


class FunctionDefinition(WireRequest):
    """A function that the model may call."""

    name: FunctionName
    description: str | None = Field(default=None, description="Shown to the model.")
    parameters: JsonSchema | None = Field(
        default=None, description="JSON schema of the arguments; every call is valid against it. Default: no arguments."
    )
    strict: bool | None = Field(
        default=None, description="Refuse a schema that cannot be enforced; otherwise, any object passes for it."
    )


class Tool(WireRequest):
    """A tool; only functions are supported."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"custom": ASKS_NOTHING}

    type: Literal["function"]
    function: FunctionDefinition

    _check_type = _only_functions()


Tools = Annotated[list[Tool], BeforeValidator(not_too_many)]


class ChosenFunction(WireRequest):
    """A function, by name."""

    name: FunctionName


class NamedTool(WireRequest):
    """A tool, by name."""

    type: Literal["function"]
    function: ChosenFunction

    _check_type = _only_functions()


class AllowedTools(WireRequest):
    """The subset of the tools that may be called; the model is shown all of them."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1)


class ToolChoice(WireRequest):
    """One function that must be called, or the tools that are allowed."""

    type: Literal["function", "allowed_tools"]
    function: ChosenFunction | None = Field(default=None, description="With type `function`.")
    allowed_tools: AllowedTools | None = Field(default=None, description="With type `allowed_tools`.")

    _check_type = _only_functions()

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ToolChoice:
        for kind in ("function", "allowed_tools"):
            if self.type == kind and getattr(self, kind) is None:
                raise missing(kind)
            if self.type != kind and getattr(self, kind) is not None:
                raise PydanticCustomError("invalid", "requires the type '{kind}'", {"field": kind, "kind": kind})
        return self


class CalledFunction(WireRequest):
    """The function that an earlier turn called."""

    name: str = Field(min_length=1, max_length=64)
    arguments: str = Field(description="JSON text, as the model wrote it.")
    parsed_arguments: Any = Field(default=None, description=PARSED)


class EarlierCall(WireRequest):
    """A call in an earlier assistant message."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"index": (None, *range(MAX_EARLIER_CALLS))}

    id: str = Field(min_length=1, max_length=128)
    type: Literal["function"] = "function"
    function: CalledFunction

    _check_type = _only_functions()


class FunctionCall(WireResponse):
    """The function that the model calls."""

    name: str
    arguments: str = Field(description="JSON text, valid against the schema unless the answer was truncated.")


class MessageToolCall(WireResponse):
    """A call in an answer."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class FunctionCallDelta(WireResponse):
    """A piece of a call: first the name, then pieces of the arguments."""

    name: str | None = None
    arguments: str = ""


class ToolCallDelta(WireResponse):
    """A piece of the call at `index`; the first piece has the id."""

    index: int
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCallDelta
