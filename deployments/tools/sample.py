"""Finds out how a chat template writes calls by rendering some.

A template renders earlier turns as in the model's training data, and therefore as the model writes them. Pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deployments.generation import ChatMessage, ChatPrompt, ToolCall, ToolSpec

NAMES = ("first_call", "second_call")
ARGUMENTS = '{"key": "value"}'
_IDS = ("aaaaaaaa1", "aaaaaaaa2")
"""Nine letters and digits: some templates refuse any other form."""
_PARAMETERS = {"type": "object", "properties": {"key": {"type": "string"}}}
PROBES = tuple(ToolSpec(name=name, description="A probe.", parameters=_PARAMETERS) for name in NAMES)
_PLAIN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSample:
    """How one template renders calls.

    Attributes:
        takes_tools: the template itself presents tools to the model.
        text: a call of `NAMES[0]` with `ARGUMENTS` and what follows it, without white space; empty if not rendered.
        takes_several: one turn may have several calls.
    """

    takes_tools: bool = False
    text: str = ""
    takes_several: bool = True


def call_sample(render: Callable[[ChatPrompt], str | None]) -> CallSample:
    """Return how a template with tool support writes calls.

    Args:
        render: returns the text of a chat, or None if the template refuses it.
    """
    plain = render(_chat(ChatMessage(role="assistant", content=_PLAIN)))
    one, both = (render(_chat(ChatMessage(role="assistant", content="", tool_calls=_calls(n)))) for n in (1, 2))
    if plain is None or one is None:
        return CallSample(takes_tools=True)
    text = _unlike(one, plain)
    if NAMES[0] not in text:
        return CallSample(takes_tools=True)
    takes_several = both is not None and NAMES[1] in _unlike(both, plain)
    return CallSample(takes_tools=True, text=text, takes_several=takes_several)


def _chat(turn: ChatMessage) -> ChatPrompt:
    return ChatPrompt(messages=(ChatMessage(role="user", content="Hello."), turn), tools=PROBES)


def _calls(number: int) -> tuple[ToolCall, ...]:
    return tuple(
        ToolCall(call_id=call_id, name=name, arguments=ARGUMENTS)
        for call_id, name in zip(_IDS[:number], NAMES, strict=False)
    )


def _unlike(text: str, other: str) -> str:
    """Return the part of `text` that differs from `other`, without white space.

    Call ids are removed, since models do not write them, and a call's name is moved before its arguments, an order that
    every model can write.
    """
    start = num_alike(text, other)
    rest, other_rest = text[start:], other[start:]
    end = len(rest) - num_alike(rest[::-1], other_rest[::-1])
    bare = "".join(rest[:end].split())
    for call_id in _IDS:
        bare = bare.replace(f'"id":"{call_id}",', "").replace(f"[CALL_ID]{call_id}", "")
    name, arguments = f'"name":"{NAMES[0]}"', f'"arguments":{"".join(ARGUMENTS.split())}'
    return bare.replace(f"{arguments},{name}", f"{name},{arguments}")


def num_alike(text: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((place for place, (char, other_char) in pairs if char != other_char), min(len(text), len(other)))
