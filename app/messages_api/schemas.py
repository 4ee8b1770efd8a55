"""`POST /v1/messages`: Anthropic's Messages; and models as its clients read them."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from app.schemas.structured import JsonSchema
from app.schemas.tools import FunctionName
from app.schemas.wire import ASKS_NOTHING, WireRequest, WireResponse, WithoutUnused, missing, refuse_types

_CACHE_HINT: tuple[object, ...] = (
    None,
    {"type": "ephemeral"},
    *({"type": "ephemeral", "ttl": t} for t in ("5m", "1h")),
)
"""Prefixes are cached without a hint."""
_KEEPS_ALL: tuple[object, ...] = (
    None,
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
)
"""Nothing is taken out of a conversation here; coding agents ask for just that."""
_FOREIGN_BLOCKS = (
    "image",
    "document",
    "search_result",
    "server_tool_use",
    "web_search_tool_result",
    "container_upload",
)
_NEEDED = {
    "text": ("text",),
    "thinking": ("thinking",),
    "redacted_thinking": (),
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


class ContentBlock(WireRequest):
    """A piece of a turn: text, a call, its result, or thoughts."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "cache_control": _CACHE_HINT,
        "citations": (None, [], {"enabled": False}),
        "caller": (None, {"type": "direct"}),
        "toolset_name": ASKS_NOTHING,
    }

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = Field(default=None, min_length=1, max_length=128)
    name: str | None = Field(default=None, min_length=1, max_length=64)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(default=None, min_length=1, max_length=128)
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_what_its_type_needs(cls, data: Any) -> Any:
        refuse_types(data, _FOREIGN_BLOCKS.__contains__, "blocks of type '{kind}' are not supported by this server")
        kind = data.get("type") if isinstance(data, dict) else None
        for field in _NEEDED.get(kind, ()) if isinstance(kind, str) else ():
            if data.get(field) is None:
                raise missing(field)
        return data


class Turn(WireRequest):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class SystemBlock(WireRequest):
    """A piece of the system prompt."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"cache_control": _CACHE_HINT, "citations": (None, [])}

    type: Literal["text"]
    text: str


class MessagesTool(WireRequest):
    """A function that the model may call."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "cache_control": _CACHE_HINT,
        "defer_loading": (None, False),
        "eager_input_streaming": (None, True, False),
        "input_examples": ASKS_NOTHING,
        "allowed_callers": (None, ["direct"]),
    }

    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonSchema
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_the_client_s(cls, data: Any) -> Any:
        words = "tools of type '{kind}' are not supported by this server; those of the client are"
        refuse_types(data, lambda kind: kind != "custom", words)
        return data


class MessagesToolChoice(WireRequest):
    """Whether the model may, must or must not call a tool, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool_where_it_is_one(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            raise missing("name")
        return self


class Thinking(WireRequest):
    """Whether the model thinks first. A budget is not held to."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"display": (None, "summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1024, description="A hint, without effect.")


class OutputFormat(WireRequest):
    """What the text of the answer looks like."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(WireRequest):
    """Of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(WireRequest):
    """Of the request."""

    user_id: str | None = Field(default=None, max_length=256, description="Accepted, and without effect.")


class CountRequest(WireRequest):
    """Ask how many tokens a prompt has."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "cache_control": _CACHE_HINT,
        "context_management": _KEEPS_ALL,
        "mcp_servers": (None, []),
        "diagnostics": ASKS_NOTHING,
        "speed": (None, "standard"),
        "thread": ASKS_NOTHING,
    }

    model: str = Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
    messages: list[Turn] = Field(min_length=1, description="A last turn of the assistant's is gone on with.")
    system: str | list[SystemBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """Ask for the next turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = CountRequest.NEUTRAL | {
        "container": ASKS_NOTHING,
        "inference_geo": ASKS_NOTHING,
    }

    max_tokens: int = Field(ge=1, le=2**31 - 1, description="Or what the context has room for.")
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(default=None, description="Without effect.")
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1)
    top_p: float | None = Field(default=None, ge=0, le=1)


class MessagesTokensDetails(WireResponse):
    """Where the tokens of the output went."""

    thinking_tokens: int


class MessagesUsage(WireResponse):
    """Token counts; `input_tokens` are those that did not come from the prefix cache."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: MessagesTokensDetails
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]


class MessageObject(WireResponse):
    """The answer. Its blocks are of the types `thinking`, `text` and `tool_use`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(WireResponse):
    """How many tokens a prompt has."""

    input_tokens: int


class ModelInfo(WireResponse):
    """A servable name, as Anthropic's clients read it."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str = Field(description="RFC 3339, at which the name was declared.")
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int = Field(description="Context length in tokens, of the prompt and the answer together.")
    max_tokens: int = Field(description="Likewise.")
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class ModelPage(WireResponse):
    """Every servable name: there is one page."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class MessagesErrorDetail(WithoutUnused):
    """What is wrong."""

    UNUSED: ClassVar[tuple[str, ...]] = ("details",)

    type: str
    message: str
    details: dict[str, Any] | None = Field(default=None, description="What a client can act on, where there is any.")


class MessagesError(WireResponse):
    """An error in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None
