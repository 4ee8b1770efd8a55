"""`POST /v1/chat/completions`, to the letter."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.schemas.common import ChatLogprobs, SamplingFields, Usage, WireFinishReason
from app.schemas.structured import ResponseFormat
from app.schemas.wire import ASKS_NOTHING, WireRequest, WireResponse

_PARTS = ("text", "refusal")
_FOREIGN_PARTS = ("image_url", "input_audio", "file", "image", "video_url", "audio_url")
_ROLES = ("system", "developer", "user", "assistant")
_FOREIGN_ROLES = ("tool", "function")


class ContentPart(WireRequest):
    """A piece of a message. Only text: this server fetches and decodes no media."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {"prompt_cache_breakpoint": ASKS_NOTHING}

    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind in _FOREIGN_PARTS:
            raise PydanticCustomError(
                "unsupported_value",
                "parts of type '{kind}' are not supported by this server; only text is",
                {"field": "type", "kind": kind},
            )
        if isinstance(kind, str) and kind in _PARTS and data.get(kind) is None:
            raise PydanticCustomError("missing", "", {"field": kind})
        return data

    def to_text(self) -> str:
        """Return what the part says."""
        return (self.text if self.type == "text" else self.refusal) or ""


class Message(WireRequest):
    """One turn of a conversation."""

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "audio": ASKS_NOTHING,
        "tool_calls": (None, []),
        "function_call": ASKS_NOTHING,
        "tool_call_id": ASKS_NOTHING,
        "annotations": (None, []),
    }

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = Field(default=None, description="Text, or text parts, which are joined.")
    name: str | None = Field(default=None, max_length=64, description="Passed to the chat template.")
    refusal: str | None = Field(default=None, description="Of an assistant's earlier turn.")

    @model_validator(mode="before")
    @classmethod
    def _has_a_role_and_content(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        role = data.get("role")
        if isinstance(role, str) and role in _FOREIGN_ROLES:
            raise PydanticCustomError(
                "unsupported_value",
                "the role '{role}' is not supported by this server",
                {"field": "role", "role": role},
            )
        is_refusal = role == "assistant" and data.get("refusal") is not None
        if role in _ROLES and data.get("content") is None and not is_refusal:
            raise PydanticCustomError("missing", "", {"field": "content"})
        if role != "assistant" and data.get("refusal") is not None:
            raise PydanticCustomError("invalid", "only an assistant's turn has a refusal", {"field": "refusal"})
        return data

    def to_text(self) -> str:
        """Return the content as one string."""
        if self.content is None:
            return self.refusal or ""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.to_text() for part in self.content)


class ChatCompletionRequest(SamplingFields):
    """Ask for the next turn of a conversation.

    Known fields that are not done yet (`tools`, `audio`, ...) are refused unless they ask for nothing.
    `metadata`, `safety_identifier`, `prompt_cache_key` and `store: false` are accepted and change nothing.
    """

    NEUTRAL: ClassVar[dict[str, tuple[object, ...]]] = {
        "audio": ASKS_NOTHING,
        "function_call": (None, "none"),
        "functions": (None, []),
        "modalities": (None, ["text"]),
        "moderation": ASKS_NOTHING,
        "parallel_tool_calls": (None, True, False),
        "prediction": ASKS_NOTHING,
        "prompt_cache_options": ASKS_NOTHING,
        "prompt_cache_retention": (None, "in_memory"),
        "reasoning_effort": (None, "none"),
        "store": (None, False),
        "tool_choice": (None, "none", "auto"),
        "tools": (None, []),
        "verbosity": (None, "medium"),
        "web_search_options": ASKS_NOTHING,
    }

    messages: list[Message] = Field(min_length=1, description="The conversation so far, oldest turn first.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Tokens of the answer at most; default: the rest of the context."
    )
    max_tokens: int | None = Field(
        default=None, ge=1, le=2**31 - 1, description="Older name of `max_completion_tokens`."
    )
    logprobs: bool | None = Field(default=None, description="Tell the log-probability of each token of the answer.")
    top_logprobs: int | None = Field(
        default=None, ge=0, le=20, description="Only with `logprobs`: and of so many likeliest tokens at each place."
    )
    response_format: ResponseFormat | None = Field(default=None, description="What the answer has to look like.")
    service_tier: Literal["auto", "default", "flex", "priority"] | None = Field(
        default=None, description="Who is served first: `priority` before `default` before `flex`, none for ever."
    )
    metadata: dict[str, str] | None = Field(default=None, max_length=16, description="Accepted, and without effect.")
    safety_identifier: str | None = Field(default=None, max_length=128, description="Accepted, and without effect.")
    prompt_cache_key: str | None = Field(
        default=None, max_length=256, description="Accepted; the prefix cache needs no hint."
    )


class AssistantMessage(WireResponse):
    """The answer. Exactly one of `content` and `refusal` is set where the input was refused."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    annotations: tuple[Any, ...] = ()


class ChatChoice(WireResponse):
    """One answer and why it ended."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: WireFinishReason


class ChatCompletion(WireResponse):
    """The whole answer."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int = Field(description="Unix time in seconds.")
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None = Field(default=None, description="The tier that served, where one was asked for.")


class ChatDelta(WireResponse):
    """What a chunk adds to the message."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None


class ChatChunkChoice(WireResponse):
    """One choice of a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: WireFinishReason | None = None


class ChatCompletionChunk(WireResponse):
    """One server-sent event of a streamed answer; the stream ends with `data: [DONE]`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    service_tier: str | None = None
