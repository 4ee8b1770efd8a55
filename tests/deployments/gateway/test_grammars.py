from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, StructTag
from pydantic import UUID4, UUID7, Base64Bytes, Base64UrlBytes, TypeAdapter

from deployments.gateway.grammars import admitted, check_grammar, followable, without_hints
from deployments.generation import Grammar, ToolSpec
from engine.errors import RequestError


def test_a_good_grammar_passes_and_a_bad_one_names_its_field() -> None:
    check_grammar(Grammar(source=LLMatcher.grammar_from_regex("a+"), field="structured_outputs"))
    for source in (LLMatcher.grammar_from_regex("(("), LLMatcher.grammar_from_json_schema({"not": {}}), "start: x"):
        with pytest.raises(RequestError) as refused:
            check_grammar(Grammar(source=source, field="response_format"))
        assert refused.value.field == "response_format"
        assert "\n" not in refused.value.message
        assert len(refused.value.message) < 400


def test_a_format_that_any_text_has_is_no_reason_against_a_tool() -> None:
    parameters = {"type": "object", "properties": {"path": {"type": "string", "format": "path"}}}
    (tool,) = followable([ToolSpec(name="x", parameters=parameters, is_strict=True)])
    assert tool.parameters == {"type": "object", "properties": {"path": {"type": "string"}}}
    parameters["properties"]["path"]["format"] = "regex"  # type: ignore[index]
    with pytest.raises(RequestError, match="Unknown format: regex"):
        followable([ToolSpec(name="x", parameters=parameters, is_strict=True)])


@pytest.mark.parametrize("kind", ["string", ["string", "null"], None, {}])
def test_a_strict_tool_whose_parameters_are_no_object_is_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match="it must be an object") as refused:
        followable([ToolSpec(name="x", parameters={"type": kind}, is_strict=True)])
    assert refused.value.field == "tools[0].function.parameters"
    (tool,) = followable([ToolSpec(name="x", parameters={"type": kind})])
    assert tool.parameters == {"type": "object"}
    for object_kind in ({"type": ["object", "null"]}, {"required": []}):
        (tool,) = followable([ToolSpec(name="x", parameters=object_kind, is_strict=True)])
        assert tool.parameters == object_kind | {"type": "object"}


def test_options_of_the_grammar_library_hide_nothing_that_it_rejects() -> None:
    parameters = {"type": "object", "x-guidance": {"lenient": True}, "not": {}}
    (tool,) = followable([ToolSpec(name="x", parameters=parameters)])
    assert tool.parameters == {"type": "object"}
    with pytest.raises(RequestError, match="cannot be followed"):
        followable([ToolSpec(name="x", parameters=parameters, is_strict=True)])


def test_a_schema_that_would_take_the_library_hours_is_refused_wherever_it_stands() -> None:
    """The library multiplies patterns that meet, and a check that has begun does not end when its client leaves."""
    costly = {"allOf": [{"type": "string", "pattern": f".*{'a' * number}.*b{{5}}.*"} for number in range(60)]}
    sources = [
        LLMatcher.grammar_from_json_schema(costly),
        LLMatcher.grammar_from_lark(f"start: /x/ %json {{}} | %json\n{json.dumps(costly)}"),
        StructTag.to_grammar([StructTag(trigger="<", begin="<a>", grammar=costly, end="</a>")]),
    ]
    for source in sources:
        with pytest.raises(RequestError, match=r"^'x' cannot be followed: More than 4 patterns or formats") as refused:
            check_grammar(Grammar(source=source, field="x"))
        assert refused.value.field == "x"
    parameters = {"type": "object", "properties": {"p": costly}}
    with pytest.raises(RequestError, match="More than 4 patterns") as refused:
        followable([ToolSpec(name="x", parameters=parameters, is_strict=True)])
    assert refused.value.field == "tools[0].function.parameters"
    (tool,) = followable([ToolSpec(name="x", parameters=parameters)])
    assert tool.parameters == {"type": "object"}


def test_what_looks_like_a_schema_in_a_grammar_but_cannot_be_read_is_left_to_the_library() -> None:
    check_grammar(Grammar(source='start: "%json" /%json \\{/', field="x"))
    for embedded in ("{,}", "[" * 100_000, ""):
        with pytest.raises(RequestError, match="cannot be followed"):
            check_grammar(Grammar(source=f"start: %json {embedded}", field="x"))


def test_the_first_beginning_that_a_grammar_admits_is_found() -> None:
    grammar = Grammar(source=LLMatcher.grammar_from_regex("é[0-9]+"), field="structured_outputs")
    assert admitted(grammar, ("1", "éa", "é12", "é")) == "é12"
    assert admitted(grammar, ("", "é")) == ""
    assert admitted(grammar, ("1", "éa")) is None
    assert admitted(grammar, ()) is None


def test_only_the_keyword_is_taken_out_of_a_schema() -> None:
    held = {"properties": {"format": {"type": "string"}}, "enum": [{"format": "path"}], "required": ["format"]}
    assert without_hints({"anyOf": [held, {"format": "password"}]}) == {"anyOf": [held, {}]}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (UUID4, "123e4567-e89b-42d3-a456-426614174000"),
        (UUID7, "0193655a-0000-7000-8000-000000000000"),
        (Base64Bytes, "aGVsbG8="),
        (Base64UrlBytes, "-_-_-w=="),
    ],
)
def test_formats_of_pydantic_s_are_followed_by_their_patterns(kind: Any, text: str) -> None:
    schema = TypeAdapter(kind).json_schema()
    assert TypeAdapter(kind).validate_json(f'"{text}"')
    source = LLMatcher.grammar_from_json_schema(without_hints(schema))
    check_grammar(Grammar(source=source, field="response_format"))
    assert admitted(Grammar(source=source, field="x"), (f'"{text}"',)) == f'"{text}"'
    wrong = text.replace("-4", "-1").replace("-7", "-1").replace("=", "")
    assert admitted(Grammar(source=source, field="x"), (f'"{wrong}"',)) is None
    # One pattern is all that a text can follow, and a client's own comes first.
    own = schema | {"pattern": "^a$"}
    assert without_hints(own) == own


@pytest.mark.parametrize("name", ["default", "examples", "enum", "const", "format", "properties", "propertyNames"])
def test_a_property_with_the_name_of_a_keyword_is_a_property(name: str) -> None:
    """A field `default: SecretStr` of pydantic's was refused for its format."""
    schema = {"type": "object", "properties": {name: {"type": "string", "format": "password"}}}
    assert without_hints(schema) == {"type": "object", "properties": {name: {"type": "string"}}}
    assert without_hints({"$defs": schema["properties"]}) == {"$defs": {name: {"type": "string"}}}


def test_names_of_which_nothing_is_asked_are_no_reason_against_a_tool() -> None:
    """A record of zod's, in a tool that is not strict, was no longer enforced at all."""
    record = {"type": "object", "additionalProperties": {"type": "integer"}}
    (tool,) = followable([ToolSpec(name="x", parameters=record | {"propertyNames": {"type": "string"}})])
    assert tool.parameters == record
    (tool,) = followable([ToolSpec(name="x", parameters=record | {"propertyNames": {"maxLength": 3}})])
    assert tool.parameters == {"type": "object"}


def test_items_that_may_repeat_rule_nothing_out_and_unique_ones_are_refused_by_the_keyword() -> None:
    """A schema that only wrote out the default was refused."""
    items = {"type": "array", "items": {"type": "integer"}}
    assert without_hints(items | {"uniqueItems": False}) == items
    source = LLMatcher.grammar_from_json_schema(without_hints(items | {"uniqueItems": True}))
    with pytest.raises(RequestError, match=r"^'response_format' cannot be followed: .*\buniqueItems\b"):
        check_grammar(Grammar(source=source, field="response_format"))


def test_a_schema_that_the_library_panics_at_is_refused() -> None:
    """It cuts the value that it complains of after 100 bytes, in the midst of a character; the request then hung."""
    source = LLMatcher.grammar_from_json_schema({"type": "string", "minLength": "🙂" * 30})
    with pytest.raises(RequestError, match=r"'response_format' cannot be followed: The grammar library gave up"):
        check_grammar(Grammar(source=source, field="response_format"))
