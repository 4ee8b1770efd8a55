"""Calls whose arguments are tags, one per parameter, instead of JSON: the allowed values and the conversion to JSON.

    <parameter=city>
    Paris
    </parameter>
    <parameter=days>
    [1, 2]
    </parameter>                {"city": "Paris", "days": [1, 2]}

Text is verbatim, between the first line break and the last; all other values are JSON. If a parameter allows text and
other types, a value that parses as one of the other types is that. Pure.

**Source:** the chat templates of Qwen/Qwen3-Coder and Qwen/Qwen3.5.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deployments.stream.reasoning import WHITE_SPACE, overlap

OPENING, NAME_END, CLOSING = "<parameter=", ">", "</parameter>"
END = "</function>"
"""The tag after the last parameter."""
ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
_TYPE_BY_CLASS = {str: "string", bool: "boolean", type(None): "null", list: "array", dict: "object", float: "number"}
_UNIONS = ("anyOf", "oneOf")
_NOTES = {"title", "description", "default", "examples", "deprecated", "$comment"}
"""Schema keys that do not constrain a value."""
_LIST = {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", *_NOTES}
"""Schema keys of an object that is just a list of parameters."""
_MAX_DEPTH = 16
_ESCAPE = re.compile(r"\\.", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One of a tool's parameters.

    Attributes:
        types: JSON types that its value may have.
        choices: all allowed values, None if they are not enumerated.
        is_text: text is written verbatim; else it is quoted, because the schema constrains it further.
        is_enforced: a grammar holds the value to the schema; else it ends at the first closing tag, whatever it is.
        schema: the self-contained schema of its value.
    """

    name: str
    is_required: bool
    types: frozenset[str]
    choices: tuple[Any, ...] | None
    is_text: bool
    is_enforced: bool = True
    schema: Mapping[str, Any]

    @property
    def is_plain(self) -> bool:
        """Whether it is always text, which can be streamed as it arrives."""
        return self.is_text and self.types == {"string"}

    @property
    def is_json(self) -> bool:
        """Whether it is certainly JSON, in whose strings the closing tag is text."""
        return self.is_enforced and not (self.is_text and "string" in self.types)

    def value(self, written: str) -> str:
        """Return the written value as JSON."""
        text = written.removeprefix("\n").removesuffix("\n")
        try:
            found = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return json.dumps(text, ensure_ascii=False)
        if self.is_text and "string" in self.types and not self._may_be(found):
            return json.dumps(text, ensure_ascii=False)
        return text.strip()

    def _may_be(self, value: object) -> bool:
        """Return whether a value that was written as JSON may be more than text."""
        if self.choices is None or isinstance(value, str):
            return bool(_types_of_value(value) & (self.types - {"string"}))
        # 1 equals True.
        return any(type(choice) is type(value) and choice == value for choice in self.choices)


def parameters_of(schema: Mapping[str, Any], *, is_enforced: bool = True) -> tuple[Parameter, ...] | None:
    """Return a tool's parameters in schema order, or None if its schema is not just a list of parameters.

    Args:
        is_enforced: a grammar holds the arguments to the schema.
    """
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_open = not properties and schema.get("additionalProperties", True) is not False
    if is_open or schema.keys() - _LIST or not isinstance(properties, Mapping) or not isinstance(required, list):
        return None
    if any(name not in properties for name in map(str, required)) or any(
        set(name) & set("<>\n") or not name for name in properties
    ):
        return None
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found = []
    for name, own in properties.items():
        parts = list(_parts(own, shared, set(), 0)) or [{}]
        choices = _choices(parts)
        found.append(
            Parameter(
                name=name,
                is_required=name in required,
                types=frozenset().union(*(_types(part) for part in parts)),
                choices=choices,
                # A model quotes text only where a grammar makes it.
                is_text=choices is not None or not is_enforced or _may_be_any_text(parts),
                is_enforced=is_enforced,
                schema={**own, **shared} if isinstance(own, Mapping) else {},
            )
        )
    return tuple(found)


class TagScan:
    """Converts tags to a JSON object incrementally, up to the tag after the last parameter.

    Args:
        parameters: the known parameters; values of others are JSON if they parse as such, else text.
    """

    def __init__(self, parameters: tuple[Parameter, ...] | None) -> None:
        self._by_name = {parameter.name: parameter for parameter in parameters or ()}
        self._parameter: Parameter | None = None
        self._num = 0
        self._is_at_front = True
        self._num_searched, self._num_untagged, self._is_in_string = 0, 0, False
        self.is_complete = False
        self.is_broken = False
        """Whether neither a parameter that may have its name nor the end follows, which no grammar allows."""

    def feed(self, text: str) -> tuple[int, str]:
        """Return the number of characters consumed and the JSON that is final after them."""
        place, made = 0, ""
        while not self.is_complete:
            used, json_text = self._step(text[place:])
            place += used
            made += json_text
            if not used:
                break
        return place, made

    def _step(self, text: str) -> tuple[int, str]:
        if self._parameter is not None:
            return self._read_value(self._parameter, text)
        start = len(text) - len(text.lstrip(WHITE_SPACE))
        if start:
            # Of itself: there may be much of it, in many pieces.
            return start, ""
        if text.startswith(END):
            self.is_complete = True
            return 0, "}" if self._num else "{}"
        if not text.startswith(OPENING):
            self.is_broken = not any(tag.startswith(text[: len(tag)]) for tag in (OPENING, END))
            return 0, ""
        name, is_whole, _ = text[len(OPENING) :].partition(NAME_END)
        self.is_broken = "<" in name or "\n" in name
        if self.is_broken or not is_whole:
            return 0, ""
        self._parameter = self._by_name.get(name) or _any_parameter(name)
        self._num += 1
        self._is_at_front = True
        self._num_searched, self._num_untagged, self._is_in_string = 0, 0, False
        opening = "{" if self._num == 1 else ", "
        quote = '"' if self._parameter.is_plain else ""
        return len(OPENING) + len(name) + 1, f"{opening}{json.dumps(name, ensure_ascii=False)}: {quote}"

    def _read_value(self, parameter: Parameter, text: str) -> tuple[int, str]:
        end = self._find_end(parameter, text)
        is_whole = end >= 0
        if not parameter.is_plain:
            if not is_whole:
                # It comes again, in front of its next piece.
                self._num_untagged = max(0, len(text) - len(CLOSING) + 1)
                return 0, ""
            self._parameter = None
            return end + len(CLOSING), parameter.value(text[:end])
        if not is_whole:
            end = len(text) - max(overlap(text, mark) for mark in (CLOSING, f"\n{CLOSING}"))
        told = text[:end]
        if told and self._is_at_front:
            told, self._is_at_front = told.removeprefix("\n"), False
        if not is_whole:
            return end, _inside(told)
        self._parameter = None
        return end + len(CLOSING), _inside(told.removesuffix("\n")) + '"'

    def _find_end(self, parameter: Parameter, text: str) -> int:
        """Return where the tag that closes the value begins, or -1; one in a string of JSON closes nothing."""
        while (end := text.find(CLOSING, max(self._num_searched, self._num_untagged))) >= 0:
            num_quotes = _ESCAPE.sub("", text[self._num_searched : end]).count('"')
            self._is_in_string ^= parameter.is_json and num_quotes % 2 == 1
            if not self._is_in_string:
                return end
            # Each part is searched once: a string may have many such tags, and comes in many pieces.
            self._num_searched = end + len(CLOSING)
        return -1


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _inside(text: str) -> str:
    """Return the text as a JSON string without its quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _any_parameter(name: str) -> Parameter:
    return Parameter(name=name, is_required=False, types=ALL_TYPES, choices=None, is_text=True, schema={})


def _parts(schema: object, shared: Mapping[str, Any], followed: set[str], depth: int) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a schema, resolving unions and references that stand alone.

    Each reference is followed once: a second time adds nothing, and mutually recursive unions would never end.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        yield schema if isinstance(schema, Mapping) else {}
        return
    asked = schema.keys() - _NOTES
    reference, union = schema.get("$ref"), next((name for name in _UNIONS if name in schema), None)
    if asked == {"$ref"} and isinstance(reference, str):
        if reference in followed:
            return
        followed.add(reference)
        table, _, name = reference.removeprefix("#/").partition("/")
        held = shared.get(table)
        yield from _parts(held.get(name) if isinstance(held, Mapping) else None, shared, followed, depth + 1)
    elif union is not None and asked == {union} and isinstance(schema[union], list):
        for part in schema[union]:
            yield from _parts(part, shared, followed, depth + 1)
    else:
        yield schema


def _may_be_any_text(parts: list[Mapping[str, Any]]) -> bool:
    """Return whether the alternatives exclude text, or one of them asks nothing of it but its type."""
    asked = [part.keys() - _NOTES for part in parts if "string" in _types(part)]
    return not asked or any(names <= {"type"} for names in asked)


def _choices(parts: list[Mapping[str, Any]]) -> tuple[Any, ...] | None:
    found: list[Any] = []
    for part in parts:
        if "const" in part:
            found.append(part["const"])
        elif isinstance(part.get("enum"), list):
            found.extend(part["enum"])
        elif part.get("type") == "null":
            found.append(None)
        else:
            return None
    return tuple(found)


def _types(part: Mapping[str, Any]) -> frozenset[str]:
    choices = _choices([part])
    if choices is not None:
        return frozenset().union(*map(_types_of_value, choices))
    told = part.get("type")
    names = [told] if isinstance(told, str) else told if isinstance(told, list) else None
    return ALL_TYPES if names is None else ALL_TYPES & frozenset(map(str, names))


def _types_of_value(value: object) -> frozenset[str]:
    if type(value) is int:
        return frozenset({"integer", "number"})
    return frozenset({_TYPE_BY_CLASS[type(value)]})
