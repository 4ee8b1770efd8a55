"""`POST /tokenize` and `POST /detokenize`: extensions, in the shape that vLLM gave them."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from app.schemas.chat import ADD_GENERATION_PROMPT, Message
from app.schemas.tools import Tools
from app.schemas.wire import ModelName, TokenId, WireRequest, WireResponse
from deployments.generation import ReasoningEffort


class TokenizeRequest(WireRequest):
    """Ask for the token ids of a text or a chat; set exactly one of `prompt` and `messages`."""

    EFFORT_IS_HINT: ClassVar[bool] = False

    model: ModelName
    prompt: str | None = Field(default=None, description="Raw text.")
    messages: list[Message] | None = Field(default=None, min_length=1, description="A chat, in the model's template.")
    add_special_tokens: bool | None = Field(
        default=None, description="With `prompt` only: add the tokenizer's special tokens; defaults to true."
    )
    tools: Tools | None = Field(default=None, description="With `messages` only: functions shown to the model.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, max_length=32, description="With `messages` only: options of the chat template, by name."
    )
    documents: list[dict[str, Any]] | None = Field(default=None, description="With `messages` only: as in chats.")
    reasoning_effort: ReasoningEffort | None = Field(default=None, description="With `messages` only: as in chats.")
    continue_final_message: bool | None = Field(
        default=None, description="With `messages` only: leave the last message, an assistant's, open."
    )
    add_generation_prompt: bool | None = Field(default=None, description=ADD_GENERATION_PROMPT)
    return_token_strs: bool | None = Field(default=None, description="Also return the tokens as text.")

    @model_validator(mode="after")
    def _asks_one_thing(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("invalid", "excludes 'messages'; set exactly one of them", {"field": "prompt"})
        if self.messages is not None and self.add_special_tokens is not None:
            raise PydanticCustomError("invalid", "is allowed only with 'prompt'", {"field": "add_special_tokens"})
        for field in (
            "tools", "chat_template_kwargs", "documents", "reasoning_effort", "continue_final_message",
            "add_generation_prompt",
        ):  # fmt: skip
            if self.messages is None and getattr(self, field) is not None:
                raise PydanticCustomError("invalid", "is allowed only with 'messages'", {"field": field})
        return self


class TokenizeResponse(WireResponse):
    """The token ids of a prompt."""

    count: int
    max_model_len: int = Field(description="Context length in tokens.")
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireRequest):
    """Ask for the text of token ids."""

    model: ModelName
    tokens: list[TokenId]


class DetokenizeResponse(WireResponse):
    """The text, special tokens included."""

    prompt: str
