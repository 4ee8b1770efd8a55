"""Requests and answers of OpenAI's Responses API: `/v1/responses` and what is below it."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from app.responses_api.tools import ResponseTools
from app.schemas.chat import ONLY_TEXT, ServingOptions
from app.schemas.common import SamplingOptions
from app.schemas.structured import JsonSchema
from app.schemas.tools import PARSED, FunctionName
from app.schemas.wire import ASKS_NOTHING, Metadata, Texts, WirePage, WireRequest, WireResponse, checked_type, missing
from deployments.generation import ReasoningEffort

_FOREIGN_PARTS = ("input_image", "input_file", "input_audio")


class InputPart(WireRequest):
    """A part of a message; only text is supported."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "annotations": (None, []),
        "prompt_cache_breakpoint": ASKS_NOTHING,
    }

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    # Not stored: they say nothing, and may be deeper than what JSON can be written of.
    logprobs: list[dict[str, Any]] | None = Field(
        default=None, exclude=True, description="From an earlier answer; no effect."
    )
    parsed: Any = Field(default=None, exclude=True, description=PARSED)

    @model_validator(mode="before")
    @classmethod
    def _has_its_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        field = "refusal" if kind == "refusal" else "text"
        if isinstance(kind, str) and data.get(field) is None:
            raise missing(field)
        return data

    # Of two validators, the later one is the first to run.
    _only_text = checked_type(_FOREIGN_PARTS.__contains__, ONLY_TEXT)

    def to_text(self) -> str:
        """Return the text of the part."""
        return (self.refusal if self.type == "refusal" else self.text) or ""


class ThoughtsPart(WireRequest):
    """A part of the reasoning of an earlier answer."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class InputItem(WireRequest):
    """A message, a call in an earlier answer, its result, the reasoning before it, or a reference to any of these."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "status": (None, "completed", "incomplete", "in_progress"),
        "encrypted_content": ASKS_NOTHING,
        "phase": (None, "commentary", "final_answer"),
        "caller": (None, {"type": "direct"}),
        "async": (None, False),
    }

    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"] = "message"
    id: str | None = Field(default=None, min_length=1, max_length=128, description="Of the item that is referred to.")
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[InputPart | ThoughtsPart] | None = None
    call_id: str | None = Field(default=None, min_length=1, max_length=128)
    name: str | None = Field(default=None, min_length=1, max_length=64)
    namespace: str | None = Field(
        default=None, min_length=1, max_length=64, description="Namespace of the called function."
    )
    arguments: str | None = None
    parsed_arguments: Any = Field(default=None, exclude=True, description=PARSED)
    output: str | list[InputPart] | None = None
    summary: list[ThoughtsPart] | None = None

    @model_validator(mode="before")
    @classmethod
    def _has_what_its_type_needs(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kind = data.get("type") or ("item_reference" if data.keys() - {"type"} == {"id"} else "message")
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "item_reference": ("id",),
        }
        for field in needed.get(kind, ()) if isinstance(kind, str) else ():
            if data.get(field) is None:
                raise missing(field)
        # Clients send items back with our ids, which have no meaning here.
        is_reference = kind == "item_reference"
        return {name: value for name, value in data.items() if name != "id" or is_reference} | {"type": kind}


class NamedFunction(WireRequest):
    """A function, by name."""

    type: Literal["function"]
    name: FunctionName


class ResponseToolChoice(WireRequest):
    """One function that must be called, or the functions that are allowed."""

    type: Literal["function", "allowed_tools"]
    name: FunctionName | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedFunction] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _has_what_its_type_says(self) -> ResponseToolChoice:
        for field in ("name",) if self.type == "function" else ("mode", "tools"):
            if getattr(self, field) is None:
                raise missing(field)
        return self


class TextFormat(WireRequest):
    """Format of the text of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(default=None, pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: JsonSchema | None = Field(default=None, alias="schema")
    strict: bool | None = None

    @model_validator(mode="after")
    def _has_a_schema_where_it_needs_one(self) -> TextFormat:
        if self.type == "json_schema" and self.schema_ is None:
            raise missing("schema")
        return self


class TextOptions(WireRequest):
    """Options for the text of the answer."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"verbosity": (None, "medium")}

    format: TextFormat | None = None


class ReasoningOptions(WireRequest):
    """How much the model thinks."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "summary": (None, "auto"),
        "generate_summary": ASKS_NOTHING,
        "context": (None, "auto"),
        "mode": (None, "standard"),
    }

    effort: ReasoningEffort | None = None


class ResponseStreamOptions(WireRequest):
    """Options of a stream."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"include_obfuscation": (None, False)}


class InputTokensRequest(WireRequest):
    """Count the tokens of an input."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "conversation": ASKS_NOTHING,
        "personality": ASKS_NOTHING,
        "truncation": (None, "disabled"),
    }

    model: str = Field(min_length=1, max_length=256, description="Public name of a base model or an adapter.")
    input: str | list[InputItem] = Field(description="Text, or the conversation as items.")
    instructions: str | None = Field(default=None, description="System message before the input.")
    parallel_tool_calls: bool | None = None
    previous_response_id: str | None = Field(
        default=None, max_length=128, description="A stored response whose conversation this one continues."
    )
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    tools: ResponseTools | None = None


class ResponsesRequest(ServingOptions, SamplingOptions, InputTokensRequest):
    """Ask for one response. Where none is stored, every request contains the whole conversation.

    `stop`, `seed`, `logit_bias` and the penalties are extensions, with their meaning in chats.
    """

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        **InputTokensRequest.NEUTRAL,
        **SamplingOptions.NEUTRAL,
        "access_programs": ASKS_NOTHING,
        "background": (None, False),
        "background_options": ASKS_NOTHING,
        "context_management": (None, []),
        "image": ASKS_NOTHING,
        "max_tool_calls": ASKS_NOTHING,
        "moderation": ASKS_NOTHING,
        "prompt": ASKS_NOTHING,
    }

    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] | None = Field(
        default=None,
        description="`message.output_text.logprobs` adds log-probabilities; reasoning is always plain text.",
    )
    client_metadata: Texts | None = Field(default=None, description="Sent by Codex; accepted, no effect.")
    max_output_tokens: int | None = Field(default=None, ge=1, le=2**31 - 1)
    metadata: Metadata | None = Field(default=None, description="Returned in the response.")
    store: bool | None = Field(
        default=None, description="Whether to store the response; null: if the server stores any (`responses_last_s`)."
    )
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)


class InputTokenCount(WireResponse):
    """Number of tokens in an input."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class InputTokensDetails(WireResponse):
    """Breakdown of the input tokens."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(WireResponse):
    """Breakdown of the output tokens."""

    reasoning_tokens: int


class ResponseUsage(WireResponse):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseObject(WireResponse):
    """The response; its items have OpenAI's types `reasoning`, `message` and `function_call`."""

    id: str
    object: Literal["response"] = "response"
    created_at: int = Field(description="Unix time in seconds.")
    completed_at: int | None = Field(
        default=None, description="Unix time in seconds; null unless the status is `completed`."
    )
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: bool = False
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = Field(default=None, description="Why the response is incomplete.")
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any]
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]]
    top_logprobs: int = 0
    top_p: float | None = None
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None
    metadata: dict[str, str]


class DeletedResponse(WireResponse):
    """A deleted response."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


class InputItemList(WirePage[dict[str, Any]]):
    """A page of the items that a response answers."""
