"""`POST /v1/chat/completions`, to the letter."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.schemas.common import (
    FINGERPRINT,
    PROMPT_TOKEN_IDS,
    STOP_REASON,
    TOKEN_IDS,
    ChatFinishReason,
    ChatLogprobs,
    PromptLogprobs,
    SamplingFields,
    Usage,
)
from app.schemas.moderations import ChatModeration, ChatModerationRequest
from app.schemas.tools import (
    MAX_EARLIER_CALLS,
    PARSED,
    EarlierCall,
    MessageToolCall,
    ToolCallDelta,
    ToolChoice,
    Tools,
)
from app.schemas.wire import ASKS_NOTHING, IfAny, Metadata, WireRequest, WireResponse, checked_type, missing
from deployments.generation import ReasoningEffort

ONLY_TEXT = "this server does not support content parts of type '{kind}', only text"
_FOREIGN_PARTS = ("image_url", "input_audio", "file", "image", "video_url", "audio_url")
_ROLES = ("system", "developer", "user", "assistant", "tool")


class ContentPart(WireRequest):
    """A part of a message. Only text is supported: this server fetches and decodes no media.

    OpenAI's agents for JavaScript send an answer's text back with the other fields of its message.
    """

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "annotations": (None, []),
        "prompt_cache_breakpoint": ASKS_NOTHING,
        "role": (None, "assistant"),
    }

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = Field(
        default=None, description="Accepted, no effect; the `tool_calls` of the message apply."
    )
    reasoning_content: str | None = Field(default=None, description="Accepted, no effect, as for `tool_calls`.")

    _only_text = checked_type(
        _FOREIGN_PARTS.__contains__, ONLY_TEXT, needed={"text": ("text",), "refusal": ("refusal",)}
    )

    def to_text(self) -> str:
        """Return what the part says."""
        return (self.text if self.type == "text" else self.refusal) or ""


def joined_text(content: str | list[ContentPart]) -> str:
    """Return the text of a message, which may be in parts."""
    return content if isinstance(content, str) else "".join(part.to_text() for part in content)


class Message(WireRequest):
    """One turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "audio": ASKS_NOTHING,
        "function_call": ASKS_NOTHING,
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = Field(default=None, description="Text, or text parts, which are joined.")
    name: str | None = Field(default=None, max_length=64, description="Passed to the chat template.")
    refusal: str | None = Field(default=None, description="Assistant messages only.")
    tool_calls: list[EarlierCall] | None = Field(
        default=None, max_length=MAX_EARLIER_CALLS, description="Assistant messages only."
    )
    tool_call_id: str | None = Field(
        default=None, min_length=1, max_length=128, description="Tool messages only: the call that this answers."
    )
    reasoning_content: str | None = Field(
        default=None, description="Assistant messages only: reasoning content; most chat templates omit it."
    )
    parsed: Any = Field(default=None, description=PARSED)

    @model_validator(mode="before")
    @classmethod
    def _has_a_role_and_content(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        role = data.get("role")
        if role == "function":
            raise PydanticCustomError(
                "unsupported_value",
                "this server does not support the role 'function'; use 'tool'",
                {"field": "role"},
            )
        says_something_else = role == "assistant" and (
            data.get("refusal") is not None or data.get("tool_calls") or data.get("reasoning_content")
        )
        if role in _ROLES and data.get("content") is None and not says_something_else:
            raise missing("content")
        if role == "tool" and data.get("tool_call_id") is None:
            raise missing("tool_call_id")
        for field in ("refusal", "tool_calls", "reasoning_content"):
            if role != "assistant" and data.get(field):
                raise PydanticCustomError("invalid", "is allowed only in assistant messages", {"field": field})
        if role != "tool" and data.get("tool_call_id") is not None:
            raise PydanticCustomError("invalid", "is allowed only in tool messages", {"field": "tool_call_id"})
        return data

    def to_text(self) -> str:
        """Return the content as one string."""
        return joined_text(self.refusal or "" if self.content is None else self.content)


class PromptCacheOptions(WireRequest):
    """How long the prefix cache is asked to retain the request's blocks."""

    mode: Literal["implicit", "explicit"] | None = Field(
        default=None, description="`implicit` caches every full block of a prompt; `explicit` is refused."
    )
    ttl: Literal["30m", "12h"] | None = Field(default=None, description="Defaults to 30m.")

    @model_validator(mode="after")
    def _caches_by_itself(self) -> PromptCacheOptions:
        if self.mode == "explicit":
            words = "this server supports only 'implicit', because it caches every prefix"
            raise PydanticCustomError("unsupported_value", words, {"field": "mode"})
        return self


class ServingOptions(WireRequest):
    """Serving options of chats and responses."""

    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        default=None, description="`priority` is served before `default`, `default` before `flex`; none waits forever."
    )
    safety_identifier: str | None = Field(default=None, max_length=128, description="Accepted, no effect.")
    prompt_cache_key: str | None = Field(
        default=None, max_length=256, description="Prefixes are shared only between equal keys, as for `cache_salt`."
    )
    prompt_cache_options: PromptCacheOptions | None = Field(
        default=None, description="Evict the request's cached blocks after others, as far as there is room."
    )
    prompt_cache_retention: Literal["in_memory", "24h"] | None = Field(
        default=None, description="Older form of `prompt_cache_options`: `24h` retains for 24 hours."
    )

    @property
    def served_tier(self) -> str | None:
        """The service tier as reported in the answer; None if none was requested."""
        return "default" if self.service_tier == "auto" else self.service_tier


class ChatPrediction(WireRequest):
    """Most of the expected answer, such as a file that needs a few edits."""

    type: Literal["content"]
    content: str | list[ContentPart] = Field(description="Text, or text parts, which are joined.")


ADD_GENERATION_PROMPT = (
    "Extension: the prompt ends with the beginning of an assistant's turn; by default, unless `continue_final_message`."
)


class ChatCompletionRequest(ServingOptions, SamplingFields):
    """Ask for the next turn of a conversation.

    Known fields that are not supported yet (`audio`, `functions`, ...) are refused unless their value asks for nothing.
    `metadata`, `safety_identifier` and `store: false` are accepted and have no effect.
    """

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        **SamplingFields.NEUTRAL,
        "add_special_tokens": (None, False),
        "audio": ASKS_NOTHING,
        "chat_template": ASKS_NOTHING,
        "echo": (None, False),
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "store": (None, False),
        "verbosity": (None, "medium"),
        "web_search_options": ASKS_NOTHING,
    }

    EFFORT_IS_HINT: ClassVar[bool] = False

    messages: list[Message] = Field(min_length=1, description="The conversation so far, oldest message first.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Maximum tokens in the answer; default: the rest of the context."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Older name of `max_completion_tokens`."
    )
    logprobs: bool | None = Field(
        default=None, description="Return the log-probability of each token of the content and of calls."
    )
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Requires `logprobs`: also return this many top tokens at each position."
    )
    tools: Tools | None = Field(default=None, description="Functions that the model may call.")
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = Field(
        default=None, description="Whether the model may, must or must not call them, or which; defaults to `auto`."
    )
    parallel_tool_calls: bool | None = Field(default=None, description="Whether one answer may contain several calls.")
    reasoning_effort: ReasoningEffort | None = Field(
        default=None, description="How much the model thinks, if its chat template offers a choice."
    )
    include_reasoning: bool | None = Field(
        default=None, description="Extension: false to leave the reasoning out of the answer; defaults to true."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, max_length=32, description="Extension: options of the model's chat template, by name."
    )
    documents: list[dict[str, Any]] | None = Field(
        default=None, description="Extension: texts to answer from, in the form that the chat template takes."
    )
    continue_final_message: bool | None = Field(
        default=None, description="Extension: continue the last message, an assistant's, instead of starting one."
    )
    add_generation_prompt: bool | None = Field(default=None, description=ADD_GENERATION_PROMPT)
    metadata: Metadata | None = Field(default=None, description="Accepted, no effect.")
    moderation: ChatModerationRequest | None = Field(
        default=None, description="Return the safety classifier's findings, and optionally block flagged text."
    )
    prediction: ChatPrediction | None = Field(
        default=None, description="Most of the expected answer: the same answer arrives sooner where it is right."
    )


class AssistantMessage(WireResponse):
    """The answer. `content` is null if the input was refused, or if there are only calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    annotations: tuple[Any, ...] = ()
    tool_calls: IfAny[list[MessageToolCall]] = Field(default=None, description="Only if there are any.")
    reasoning_content: IfAny[str] = Field(default=None, description="The model's reasoning, if any.")


class ChatChoice(WireResponse):
    """One answer and why it ended."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason
    stop_reason: IfAny[str | int] = Field(default=None, description=STOP_REASON)
    token_ids: IfAny[list[int]] = Field(default=None, description=TOKEN_IDS)


class ChatCompletion(WireResponse):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: IfAny[str] = Field(default=None, description=FINGERPRINT)
    service_tier: str | None = Field(default=None, description="The tier that was used, if one was requested.")
    prompt_logprobs: IfAny[PromptLogprobs] = Field(default=None, description="Extension: present if requested.")
    prompt_token_ids: IfAny[list[int]] = Field(default=None, description=PROMPT_TOKEN_IDS)
    moderation: IfAny[ChatModeration] = Field(default=None, description="Present if requested.")


class ChatDelta(WireResponse):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None
    reasoning_content: str | None = None


class ChatChunkChoice(WireResponse):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: IfAny[str | int] = Field(default=None, description=STOP_REASON)
    token_ids: IfAny[list[int]] = Field(default=None, description=TOKEN_IDS)


class ChatCompletionChunk(WireResponse):
    """One server-sent event of a streamed answer; the stream ends with `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    system_fingerprint: str | None = None
    service_tier: str | None = None
    prompt_logprobs: PromptLogprobs | None = Field(default=None, description="In the first chunk, if requested.")
    prompt_token_ids: IfAny[list[int]] = Field(default=None, description=PROMPT_TOKEN_IDS)
    moderation: ChatModeration | None = Field(default=None, description="In a chunk of its own, if requested.")
    obfuscation: str | None = Field(default=None, description="Random padding, if requested.")
