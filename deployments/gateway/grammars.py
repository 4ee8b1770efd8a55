"""Check whether a grammar can be followed at all, before any model is involved. Blocking: call in a thread."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from deployments.gateway import schema_cost
from deployments.generation import Grammar, ToolSpec
from deployments.tools.grammar import JSON_STYLE
from engine.errors import RequestError

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
ANY_OBJECT: dict[str, Any] = {"type": "object"}
"""What is enforced of the parameters of a tool whose schema cannot be."""

_HINTS = frozenset({"password", "binary", "path", "file-path", "directory-path"})
"""Formats that any string satisfies; pydantic writes them for secrets, bytes and paths."""
_HEX = "[0-9a-fA-F]"
_PATTERN_BY_FORMAT = {
    f"uuid{version}": f"^{_HEX}{{8}}-{_HEX}{{4}}-{version}{_HEX}{{3}}-[89abAB]{_HEX}{{3}}-{_HEX}{{12}}$"
    for version in (1, 3, 4, 5, 6, 7, 8)
} | {
    f"base64{kind}": f"^([A-Za-z0-9{signs}]{{4}})*([A-Za-z0-9{signs}]{{2}}==|[A-Za-z0-9{signs}]{{3}}=)?$"
    for kind, signs in (("", "+/"), ("url", "_-"))
}
"""Formats of pydantic's that the grammar library does not know."""
_ANY_NAME = {"type": "string"}
"""What zod writes for the names of a record: every name is a string."""
_VALUES = frozenset({"const", "default", "enum", "examples"})
_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords that hold schemas by names of the client's, which are no keywords."""

_EMBEDDED = re.compile(r"%json\s*")
_JSON = json.JSONDecoder()

MAX_KNOWN = 256
MAX_REASON_CHARS = 300


def check_grammar(grammar: Grammar) -> None:
    """Check that a grammar can be followed.

    Raises:
        RequestError: the grammar cannot be followed; names the field that asked for it.
    """
    if reason := _reason_against(grammar.source):
        raise unfollowable(grammar.field, reason)


def followable(tools: Sequence[ToolSpec]) -> tuple[ToolSpec, ...]:
    """Return tools whose parameters can be enforced; a non-strict tool whose schema cannot be accepts any object.

    Raises:
        RequestError: the parameters of a strict tool cannot be followed.
    """
    return tuple(_followable(index, tool) for index, tool in enumerate(tools))


@lru_cache(MAX_KNOWN)
def admitted(grammar: Grammar, beginnings: tuple[str, ...]) -> str | None:
    """Return the first of `beginnings` with which a text that follows the grammar may begin, or None."""
    matcher = LLMatcher(LLTokenizer("byte"), grammar.source, log_level=0)
    for beginning in beginnings:
        # With this tokenizer each byte is a token.
        token_ids = list(beginning.encode())
        if matcher.try_consume_tokens(token_ids) == len(token_ids):
            return beginning
        matcher.reset()
    return None


def without_hints(schema: Any) -> Any:
    """Return a schema without what the grammar library rejects although it rules nothing out, or has another spelling.

    The former are formats and names that any text is or has, and `uniqueItems: false`, the latter formats that a
    pattern describes.
    """
    if isinstance(schema, list):
        return [without_hints(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {name: _value_without_hints(name, value) for name, value in schema.items() if not _is_hint(name, value)}
    pattern = _PATTERN_BY_FORMAT.get(kept["format"]) if isinstance(kept.get("format"), str) else None
    if pattern is None or "pattern" in kept:
        return kept
    return {name: value for name, value in kept.items() if name != "format"} | {"pattern": pattern}


def _value_without_hints(keyword: str, value: Any) -> Any:
    if keyword in _VALUES:
        return value
    if keyword in _BY_NAME and isinstance(value, dict):
        return {name: without_hints(inner) for name, inner in value.items()}
    return without_hints(value)


def _is_hint(keyword: str, value: Any) -> bool:
    if keyword == "format":
        return isinstance(value, str) and value in _HINTS
    if keyword == "uniqueItems":
        return value is False
    return keyword == "propertyNames" and value == _ANY_NAME


def unfollowable(field: str, reason: str) -> RequestError:
    """Return the refusal of a field whose grammar cannot be followed."""
    return RequestError.about(field, f"cannot be followed: {reason}")


def _followable(index: int, tool: ToolSpec) -> ToolSpec:
    field = f"tools[{index}].function.parameters"
    parameters = without_hints(tool.parameters or NO_PARAMETERS)
    kind = parameters.get("type", "object")
    if tool.is_strict and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise unfollowable(field, "it must be an object")
    # The library's own options, which our own replace in the grammar of calls, would hide what it rejects.
    parameters = {name: value for name, value in parameters.items() if name != "x-guidance"} | {"type": "object"}
    reason = _reason_against(LLMatcher.grammar_from_json_schema(parameters, defaults=JSON_STYLE))
    if reason and tool.is_strict:
        raise unfollowable(field, reason)
    return replace(tool, parameters=ANY_OBJECT if reason else parameters)


@lru_cache(MAX_KNOWN)
def _reason_against(source: str) -> str:
    # The library's own limits bound neither the patterns nor the alternatives that a schema combines.
    if reason := next(filter(None, map(schema_cost.reason_against, _schemas_in(source))), ""):
        return reason
    try:
        complaint = LLMatcher.validate_grammar(source)
    except BaseException as error:
        if isinstance(error, Exception):
            raise
        # The library panics when it quotes a long invalid value, and a panic is not an `Exception`.
        return "The grammar library gave up on a value in it."
    return "" if complaint.startswith("WARNING") else " ".join(complaint.split())[:MAX_REASON_CHARS]


def _schemas_in(source: str) -> Iterator[Any]:
    """Yield the schemas in a grammar, which is Lark, or JSON around Lark and schemas."""
    grammars = json.loads(source)["grammars"] if source.startswith("{") else [{"lark_grammar": source}]
    for grammar in grammars:
        yield grammar.get("json_schema")
        lark, end = grammar.get("lark_grammar") or "", 0
        while embedded := _EMBEDDED.search(lark, end):
            end = embedded.end()
            # What this cannot read the library cannot read either, and it allows fewer levels.
            with suppress(ValueError, RecursionError):
                schema, end = _JSON.raw_decode(lark, end)
                yield schema
