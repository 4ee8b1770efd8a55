"""Whether a grammar can be followed at all, asked before any model has to do with it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from deployments.generation import Grammar, ToolSpec
from deployments.tools.grammar import JSON_STYLE
from engine.errors import RequestError

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}

_HINTS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""Formats that any text has: what pydantic writes of a secret, of bytes and of paths."""
_VALUES = frozenset({"const", "default", "enum", "examples"})

MAX_KNOWN = 256
MAX_REASON_CHARS = 300


async def check_grammar(grammar: Grammar) -> None:
    """Do nothing, off the event loop.

    Raises:
        RequestError: the grammar cannot be followed; names the field that asked for it.
    """
    reason = await asyncio.to_thread(_reason_against, grammar.source)
    if reason:
        raise unfollowable(grammar.field, reason)


async def followable(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return tools whose parameters a grammar can follow: any object where those of one that is not strict cannot.

    Raises:
        RequestError: the parameters of a strict one cannot be followed.
    """
    return await asyncio.to_thread(lambda: tuple(_followable(index, tool) for index, tool in enumerate(tools)))


async def admitted(grammar: Grammar, beginnings: Sequence[str]) -> str | None:
    """Return the first of the beginnings that a text may have which follows the grammar."""
    return await asyncio.to_thread(_admitted, grammar.source, tuple(beginnings))


def without_hints(schema: Any) -> Any:
    """Return a schema without the formats that rule nothing out; the grammar library refuses what it does not know."""
    if isinstance(schema, list):
        return [without_hints(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _VALUES else without_hints(value)
        for name, value in schema.items()
        if not (name == "format" and isinstance(value, str) and value in _HINTS)
    }


def unfollowable(field: str, reason: str) -> RequestError:
    """Return the refusal of a field whose grammar cannot be followed."""
    return RequestError(f"'{field}' cannot be followed: {reason}", field=field)


def _followable(index: int, tool: ToolSpec) -> ToolSpec:
    parameters = without_hints(tool.parameters or NO_PARAMETERS)
    if parameters.get("type") != "object":
        parameters = parameters | {"type": "object"}
    reason = _reason_against(LLMatcher.grammar_from_json_schema(parameters, defaults=JSON_STYLE))
    if reason and tool.is_strict:
        field = f"tools[{index}].function.parameters"
        raise unfollowable(field, reason)
    return replace(tool, parameters={"type": "object"} if reason else parameters)


@lru_cache(MAX_KNOWN)
def _admitted(source: str, beginnings: tuple[str, ...]) -> str | None:
    matcher = LLMatcher(LLTokenizer("byte"), source, log_level=0)
    for beginning in beginnings:
        # To this tokenizer a byte is a token.
        token_ids = list(beginning.encode())
        if matcher.try_consume_tokens(token_ids) == len(token_ids):
            return beginning
        matcher.reset()
    return None


@lru_cache(MAX_KNOWN)
def _reason_against(source: str) -> str:
    # Bounded by the library's own limits, a tenth of a second for the largest that a request can hold.
    try:
        complaint = LLMatcher.validate_grammar(source)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        # It panics where it would quote a long value that is wrong, and a panic is no `Exception`.
        return "The grammar library gave up on a value in it."
    return "" if complaint.startswith("WARNING") else " ".join(complaint.split())[:MAX_REASON_CHARS]
