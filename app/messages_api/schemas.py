"""Schemas of `POST /v1/messages`, Anthropic's Messages API, and of models in Anthropic's format."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from app.schemas.structured import JsonSchema
from app.schemas.tools import not_too_many
from app.schemas.wire import ASKS_NOTHING, IfAny, ModelName, WireRequest, WireResponse, checked_type, missing

MAX_TOOL_NAME_CHARS = 128
"""Of a tool. Anthropic's clients join the names of a server and of its tool, which makes more than OpenAI's 64."""
ToolName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_-]{{1,{MAX_TOOL_NAME_CHARS}}}$")]

_CACHE_HINT: tuple[object, ...] = (
    None,
    {"type": "ephemeral"},
    *({"type": "ephemeral", "ttl": t} for t in ("5m", "1h")),
)
"""Cache hints have no effect: every prefix is cached."""
_KEEPS_ALL: tuple[object, ...] = (
    None,
    {"edits": []},
    {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]},
)
"""Values that keep the conversation unchanged, as coding agents send them; this server never edits one."""
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
    "tool_use": ("id", "name", "input"),
    "tool_result": ("tool_use_id",),
}


class ContentBlock(WireRequest):
    """Part of a turn: text, a tool call, its result, or thinking."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "cache_control": _CACHE_HINT,
        "citations": (None, [], {"enabled": False}),
        "caller": (None, {"type": "direct"}),
        "toolset_name": ASKS_NOTHING,
    }

    type: Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = Field(default=None, description="Of thinking; accepted, no effect.")
    data: str | None = Field(default=None, description="Of redacted thinking; accepted, no effect.")
    id: str | None = Field(default=None, min_length=1, max_length=128)
    name: str | None = Field(default=None, min_length=1, max_length=MAX_TOOL_NAME_CHARS)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(default=None, min_length=1, max_length=128)
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = Field(
        default=None, description="Of a tool's result: where it is empty, the model reads `Error`; else no effect."
    )

    _has_what_its_type_needs = checked_type(
        _FOREIGN_BLOCKS.__contains__, "this server does not support blocks of type '{kind}'", _NEEDED
    )


class Turn(WireRequest):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class SystemBlock(WireRequest):
    """Part of the system prompt."""

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
    name: ToolName
    description: str | None = None
    input_schema: JsonSchema
    strict: bool | None = None

    _only_the_client_s = checked_type(
        "custom".__ne__, "this server does not support tools of type '{kind}', only client tools"
    )


class MessagesToolChoice(WireRequest):
    """Whether the model may, must or must not call a tool, or which."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _names_a_tool_where_it_is_one(self) -> MessagesToolChoice:
        if self.type == "tool" and self.name is None:
            raise missing("name")
        return self


class Thinking(WireRequest):
    """Whether the model thinks before it answers; a budget is not enforced."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"display": (None, "summarized")}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(default=None, ge=1024, description="Accepted, no effect.")


class OutputFormat(WireRequest):
    """JSON schema that the text of the answer must match."""

    type: Literal["json_schema"]
    schema_: JsonSchema = Field(alias="schema")


class OutputConfig(WireRequest):
    """Effort and format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class MessagesMetadata(WireRequest):
    """Metadata of the request."""

    user_id: str | None = Field(default=None, max_length=256, description="Accepted, no effect.")


class CountRequest(WireRequest):
    """Count the tokens of a prompt."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "cache_control": _CACHE_HINT,
        "context_management": _KEEPS_ALL,
        "mcp_servers": (None, []),
        "diagnostics": ASKS_NOTHING,
        "speed": (None, "standard"),
        "thread": ASKS_NOTHING,
    }

    model: ModelName
    messages: list[Turn] = Field(min_length=1, description="A last assistant turn without tool calls is continued.")
    system: str | list[SystemBlock] | None = None
    tools: Annotated[list[MessagesTool], BeforeValidator(not_too_many)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """Ask for the next turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = CountRequest.NEUTRAL | {
        "container": ASKS_NOTHING,
        "inference_geo": ASKS_NOTHING,
    }

    max_tokens: int = Field(ge=1, le=2**31 - 1, description="Clipped to what fits in the context.")
    metadata: MessagesMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = Field(default=None, description="Accepted, no effect.")
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_k: int | None = Field(default=None, ge=0, le=2**31 - 1)
    top_p: float | None = Field(default=None, ge=0, le=1)


class MessagesTokensDetails(WireResponse):
    """Breakdown of the output tokens."""

    thinking_tokens: int


class MessagesUsage(WireResponse):
    """Token counts; `input_tokens` excludes tokens that came from the prefix cache."""

    input_tokens: int
    output_tokens: int
    output_tokens_details: MessagesTokensDetails
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "refusal", "model_context_window_exceeded"]


class MessageObject(WireResponse):
    """The answer; its blocks have the types `thinking`, `text` and `tool_use`."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessagesUsage


class TokenCount(WireResponse):
    """Number of tokens in a prompt."""

    input_tokens: int


class ModelInfo(WireResponse):
    """A servable name in Anthropic's format."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str = Field(description="When the name was declared, in RFC 3339.")
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int = Field(description="Context length in tokens, prompt and answer together.")
    max_tokens: int = Field(description="Same as `max_input_tokens`.")
    capabilities: None = None
    deprecated_at: None = None
    line: None = None
    retires_at: None = None


class ModelPage(WireResponse):
    """All servable names, always on one page."""

    data: list[ModelInfo]
    first_id: str | None
    last_id: str | None
    has_more: Literal[False] = False


class MessagesErrorDetail(WireResponse):
    """What went wrong."""

    type: str
    message: str
    details: IfAny[dict[str, Any]] = Field(default=None, description="Machine-readable details, if there are any.")


class MessagesError(WireResponse):
    """An error in Anthropic's format."""

    type: Literal["error"] = "error"
    error: MessagesErrorDetail
    request_id: str | None = None
