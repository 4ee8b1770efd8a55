"""The texts that make up a prompt, and the nested values that some of them are in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from deployments.generation import ChatPrompt, Prompt, TextPrompt, TokenPrompt

CHARS_PER_TOKEN = 4
"""An average, used until the tokenizer has counted."""


def num_chars(prompt: Prompt) -> int:
    """Return the characters of a prompt, including what a chat has besides messages."""
    if isinstance(prompt, TokenPrompt):
        return CHARS_PER_TOKEN * len(prompt.token_ids)
    return sum(map(len, texts_read(prompt)))


def texts_read(prompt: ChatPrompt | TextPrompt) -> Iterator[str]:
    """Yield all texts from which a prompt's tokens are made."""
    if isinstance(prompt, TextPrompt):
        yield from (prompt.text, prompt.suffix)
        return
    for message in prompt.messages:
        yield message.content
        yield message.reasoning or ""
        yield from (call.arguments for call in message.tool_calls)
    for tool in prompt.tools:
        yield tool.description
        yield from texts_in(tool.parameters)
    yield from texts_in(prompt.template_options)


def texts_in(value: Any) -> Iterator[str]:
    """Yield every text in nested values, including the keys of objects."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from texts_in(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from texts_in(inner)


def object_in(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a text is, None if it is none."""
    try:
        # Not by orjson: beyond 64 bits it makes floats of integers.
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def depth_of(value: Any) -> int:
    """Return how many levels deep objects and arrays are nested that hold anything."""
    depth, level = 0, [value]
    while level := [inner for outer in level for inner in _children(outer)]:
        depth += 1
    return depth


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
