"""Arguments that are tags: what a schema says of their values, and the JSON that they become however they are cut."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from deployments.generation import ToolSpec
from deployments.tools.formats import FORMATS
from deployments.tools.grammar import CallRules, write_grammar
from deployments.tools.parser import CallParser
from deployments.tools.tagged import ALL_TYPES, TagScan, parameters_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": "integer"},
        "either": {"type": ["string", "number"]},
        "unit": {"enum": ["C", "F", None]},
        "day": {"type": "string", "format": "date"},
        "where": {"$ref": "#/$defs/Place"},
        "any": {},
    },
    "required": ["text"],
    "$defs": {"Place": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOL = ToolSpec(name="f", parameters=SCHEMA)
CODER = FORMATS["qwen3_coder"]


def tags(**values: str) -> str:
    return "\n".join(f"<parameter={name}>\n{value}\n</parameter>" for name, value in values.items())


def call(**values: str) -> str:
    return f"<tool_call>\n<function=f>\n{tags(**values)}\n</function>\n</tool_call>"


def scanned(pieces: Sequence[str], schema: dict[str, Any] = SCHEMA) -> tuple[str, bool]:
    scan, held, made = TagScan(parameters_of(schema)), "", ""
    for piece in pieces:
        held += piece
        used, text = scan.feed(held)
        held, made = held[used:], made + text
    return made, scan.is_complete


def test_what_a_schema_says_of_each_parameter() -> None:
    found = {parameter.name: parameter for parameter in parameters_of(SCHEMA) or ()}
    assert [name for name, parameter in found.items() if parameter.is_required] == ["text"]
    assert {name: set(parameter.types) for name, parameter in found.items()} == {
        "text": {"string"},
        "note": {"string", "null"},
        "count": {"integer"},
        "either": {"string", "number"},
        "unit": {"string", "null"},
        "day": {"string"},
        "where": {"object"},
        "any": set(ALL_TYPES),
    }
    assert found["unit"].choices == ("C", "F", None)
    assert [name for name, parameter in found.items() if not parameter.is_text] == ["day"]
    assert [name for name, parameter in found.items() if parameter.is_plain] == ["text"]


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {"a": {}}, "required": ["b"]},
        {"type": "object", "properties": {"a": {}}, "required": "a"},
        {"type": "object", "properties": {"a": {}}, "minProperties": 1},
        {"anyOf": [{"type": "object", "properties": {"a": {}}}]},
        {"type": "object", "properties": {"a>b": {}}},
        {"type": "object", "properties": []},
        {"type": "object", "properties": {"": {}}},
    ],
)
def test_a_schema_that_is_no_list_of_parameters_has_none(schema: dict[str, Any]) -> None:
    assert parameters_of(schema) is None


def test_a_tool_may_have_no_parameters() -> None:
    assert parameters_of({"type": "object", "properties": {}, "additionalProperties": False}) == ()


@pytest.mark.parametrize(
    "own",
    [
        {"type": "string", "minLength": 1},
        {"allOf": [{"type": "string"}]},
        {"$ref": "#/$defs/A", "pattern": "x"},
        {"anyOf": [{"type": "string"}, {"type": "null"}], "maxLength": 3},
        {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        {"not": {"const": "x"}},
        {"type": ["string", "array"], "items": {}},
        {"anyOf": [{"type": "integer"}, {"const": "auto", "type": "string"}]},
        {"anyOf": [{"enum": ["a", "b"]}, {"type": "array", "items": {"type": "string"}}]},
    ],
)
def test_text_of_which_more_is_asked_is_quoted(own: dict[str, Any]) -> None:
    (found,) = parameters_of({"type": "object", "properties": {"a": own}, "$defs": {"A": {"type": "string"}}}) or ()
    assert not found.is_text
    assert not found.is_plain


@pytest.mark.parametrize(
    "own",
    [
        {"type": "string", "description": "a", "default": "b"},
        {"$ref": "#/$defs/A", "title": "a"},
        {"anyOf": [{"$ref": "#/$defs/A"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]},
        {"enum": ["a", "b"], "minLength": 1},
        {"const": "a"},
        {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]},
        True,
        {"type": 5},
        {"anyOf": [{"const": "auto", "type": "string"}, {"type": "string"}]},
        {"anyOf": [{"enum": [1, 2]}, {"type": "string"}]},
        {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string", "minLength": 1}}]},
        {},
    ],
)
def test_other_text_stands_as_it_is(own: object) -> None:
    (found,) = parameters_of({"type": "object", "properties": {"a": own}, "$defs": {"A": {"type": "string"}}}) or ()
    assert found.is_text


def test_references_without_end_end() -> None:
    loop = {"$ref": "#/$defs/A"}
    (found,) = parameters_of({"type": "object", "properties": {"a": loop}, "$defs": {"A": loop}}) or ()
    assert found.types == ALL_TYPES


def test_references_are_not_followed_for_ever() -> None:
    chain = {f"{link}": {"$ref": f"#/$defs/{link + 1}"} for link in range(2000)}
    properties = {"a": {"$ref": "#/$defs/0"}}
    (found,) = parameters_of({"type": "object", "properties": properties, "$defs": chain}) or ()
    assert found.types == ALL_TYPES


def test_unions_of_references_to_unions_are_each_followed_once() -> None:
    """Followed wherever they are named these would be five to the sixteenth."""
    many = {"anyOf": [*({"$ref": f"#/$defs/{name}"} for name in "ABCDE"), {"type": "null"}]}
    schema = {"type": "object", "properties": {"a": many}, "$defs": dict.fromkeys("ABCDE", many)}
    (found,) = parameters_of(schema) or ()
    assert found.types == {"null"}


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"text": "Paris"}, {"text": "Paris"}),
        ({"text": ""}, {"text": ""}),
        ({"text": "  two\n  lines\n"}, {"text": "  two\n  lines\n"}),
        ({"text": '"quoted" \\ <parameter=x> </parameter'}, {"text": '"quoted" \\ <parameter=x> </parameter'}),
        ({"text": "5"}, {"text": "5"}),
        ({"note": "null"}, {"note": None}),
        ({"note": "nullable"}, {"note": "nullable"}),
        ({"note": "true"}, {"note": "true"}),
        ({"count": " 5 "}, {"count": 5}),
        ({"either": "5"}, {"either": 5}),
        ({"either": "007"}, {"either": "007"}),
        ({"either": "true"}, {"either": "true"}),
        ({"unit": "F"}, {"unit": "F"}),
        ({"unit": "null"}, {"unit": None}),
        ({"day": '"2026-01-02"'}, {"day": "2026-01-02"}),
        ({"where": '{"x": 1.5}'}, {"where": {"x": 1.5}}),
        ({"any": "[1, 2]"}, {"any": [1, 2]}),
        ({"any": "NaN"}, {"any": "NaN"}),
        ({"any": "-Infinity"}, {"any": "-Infinity"}),
        ({"unknown": "word"}, {"unknown": "word"}),
        ({"text": "a", "count": "1"}, {"text": "a", "count": 1}),
        ({}, {}),
    ],
)
def test_what_was_written_becomes_what_it_stands_for(values: dict[str, str], expected: dict[str, Any]) -> None:
    text = f"\n{tags(**values)}\n</function>"
    for pieces in ([text], list(text)):
        made, is_complete = scanned(pieces)
        assert is_complete
        assert json.loads(made) == expected


@settings(max_examples=200, deadline=None)
@given(
    text=st.lists(st.sampled_from(["\n", "</param", "</parameter", "\\", '"', "é", "word", "<parameter=", " "])).map(
        "".join
    ),
    places=st.lists(st.integers(0, 10_000), max_size=8),
)
def test_text_is_the_same_however_it_is_cut(text: str, places: list[int]) -> None:
    whole = f"<parameter=text>\n{text}\n</parameter></function>"
    edges = [0, *sorted(place % len(whole) for place in places), len(whole)]
    made, is_complete = scanned([whole[start:end] for start, end in itertools.pairwise(edges)])
    assert is_complete
    assert json.loads(made) == {"text": text}


def test_text_is_told_as_it_comes() -> None:
    parser = CallParser(CODER, {"f": SCHEMA}, new_call_id=lambda: "id")
    parser.feed("<tool_call>\n<function=f>\n<parameter=text>\nPa")
    _, (delta,) = parser.feed("ris is")
    assert delta.arguments == "ris is"
    assert parser.feed("\n</par")[1] == ()
    assert not parser.has_calls
    (end,) = parser.feed("ameter>\n</function>")[1]
    assert end.arguments == '"}'
    assert parser.has_calls


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(Path("models/stdlib-chat/tokenizer.json").read_text())


def may_be_whole(tokenizer: LLTokenizer, text: str, tool: ToolSpec = TOOL) -> bool:
    rules = CallRules(tool_format=CODER, tools=(tool,), callable_names=frozenset({"f"}), is_required=True)
    matcher = LLMatcher(tokenizer, write_grammar({}, calls=rules), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


VALID = [
    {"text": "Paris"},
    {"text": "two\n  lines <b>", "note": "null", "count": "5"},
    {"text": "", "either": "x", "unit": "C", "day": '"2026-01-02"', "where": '{"x": 1}', "any": "anything"},
    {"text": "a", "unit": "null"},
]


@pytest.mark.parametrize("values", VALID)
def test_valid_arguments_pass_and_are_valid(tokenizer: LLTokenizer, values: dict[str, str]) -> None:
    assert may_be_whole(tokenizer, call(**values))
    made, _ = scanned([tags(**values) + "</function>"])
    jsonschema.validate(json.loads(made), SCHEMA, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"note": "no text"},
        {"text": "a", "count": "many"},
        {"text": "a", "unit": "K"},
        {"text": "a", "day": "2026-01-02"},
        {"text": "a", "day": '"tomorrow"'},
        {"text": "a", "where": "{}"},
        {"text": "a", "other": "b"},
        {"count": "5", "text": "a"},
    ],
)
def test_others_do_not_pass(tokenizer: LLTokenizer, values: dict[str, str]) -> None:
    assert not may_be_whole(tokenizer, call(**values))


def test_a_tag_in_a_string_of_json_closes_nothing(tokenizer: LLTokenizer) -> None:
    """An agent that edits templates passes them in a list, or as text that must not be empty."""
    own = {"lines": {"type": "array", "items": {"type": "string"}}, "text": {"type": "string", "minLength": 1}}
    schema = {"type": "object", "properties": own, "required": ["lines", "text"]}
    values = {"lines": ["a</parameter>", "</parameter>\n</function>"], "text": "</parameter>"}
    told = {name: json.dumps(value) for name, value in values.items()}
    assert may_be_whole(tokenizer, call(**told), ToolSpec(name="f", parameters=schema))
    for pieces in ([tags(**told) + "</function>"], list(tags(**told) + "</function>")):
        made, is_complete = scanned(pieces, schema)
        assert is_complete
        assert json.loads(made) == values


def test_a_long_value_is_not_searched_from_the_front_for_each_piece() -> None:
    """Of a megabyte, that took a millisecond for each token."""
    starts: list[int] = []

    class Text(str):
        __slots__ = ()

        def find(self, sub: str, start: int = 0, end: int = sys.maxsize) -> int:  # type: ignore[override]
            starts.append(start)
            return super().find(sub, start, end)

        def __getitem__(self, place: SupportsIndex | slice) -> str:
            return Text(super().__getitem__(place))

    scan, text = TagScan(parameters_of({"properties": {"v": {"type": "array"}}})), "<parameter=v>\n["
    used, _ = scan.feed(text)
    text = text[used:]
    for piece in ("1, " * 9, '"</parameter>", ', "2, " * 9, "3, </par"):
        num_known = len(text)
        text += piece
        assert scan.feed(Text(text)) == (0, "")
        assert starts.pop() >= num_known - len("</parameter>")
    used, made = scan.feed(text[: -len("</par")] + "4]\n</parameter>")
    assert (used, made.count("</parameter>"), made[-5:]) == (len(text) + 10, 1, "3, 4]")


def test_a_tag_in_an_enumerated_value_closes_nothing(tokenizer: LLTokenizer) -> None:
    choices = [["</parameter>"], {"a": "b</parameter>"}, 1]
    schema = {"type": "object", "properties": {"a": {"enum": choices}}, "required": ["a"]}
    for choice in choices:
        assert may_be_whole(tokenizer, call(a=json.dumps(choice)), ToolSpec(name="f", parameters=schema))
        made, is_complete = scanned([tags(a=json.dumps(choice)) + "</function>"], schema)
        assert is_complete
        assert json.loads(made) == {"a": choice}


def test_a_value_that_may_not_be_text_stays_what_it_is_though_nothing_holds_it_to_its_type() -> None:
    (count,) = parameters_of({"properties": {"count": {"type": "integer"}}}, is_enforced=False) or ()
    assert (count.value("5"), count.value("5.5"), count.value("five")) == ("5", "5.5", '"five"')


@pytest.mark.parametrize("value", ["True", "{'x': 1}", "[1, 2", "", '["a"', "5 </param"])
def test_what_should_be_json_and_is_not_ends_at_the_tag(value: str) -> None:
    """Nothing is enforced of a tool whose schema cannot be followed; the call never ended, and was lost."""
    text = tags(count=value, text="a") + "</function>"
    for pieces in ([text], list(text)):
        made, is_complete = scanned(pieces)
        assert is_complete
        assert json.loads(made) == {"count": value, "text": "a"}


@pytest.mark.parametrize(
    "choices", [["1", 2, None, True], ["F", '"F"', None], ["\n", ",", "a\n", ""], ["null", "x"], ["0", False, 1]]
)
def test_a_value_that_passes_as_an_enumerated_one_is_one(tokenizer: LLTokenizer, choices: list[Any]) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": choices}}, "required": ["a"]}
    tool = ToolSpec(name="f", parameters=schema)
    said = [choice if isinstance(choice, str) else json.dumps(choice) for choice in choices]
    found = []
    for before, text, after in itertools.product(("", "\n"), said, ("", "\n")):
        arguments = f"<parameter=a>{before}{text}{after}</parameter>\n</function>"
        if may_be_whole(tokenizer, f"<tool_call>\n<function=f>\n{arguments}\n</tool_call>", tool):
            found.append(json.loads(scanned([arguments], schema)[0])["a"])
    assert {(type(value), value) for value in found} == {(type(choice), choice) for choice in choices}


def test_a_choice_among_values_of_another_type_is_the_only_text(tokenizer: LLTokenizer) -> None:
    """What Python writes as `int | Literal["auto"]` took any text, in strict tools too."""
    own = {"anyOf": [{"type": "integer"}, {"const": "auto", "type": "string"}]}
    schema = {"type": "object", "properties": {"a": own}, "required": ["a"]}
    tool = ToolSpec(name="f", parameters=schema)
    for value, is_valid in (("5", True), ('"auto"', True), ("auto", False), ('"whatever"', False), ("5.5", False)):
        assert may_be_whole(tokenizer, call(a=value), tool) is is_valid
    assert json.loads(scanned([tags(a='"auto"') + "</function>"], schema)[0]) == {"a": "auto"}


def test_where_nothing_is_known_of_arguments_any_pass(tokenizer: LLTokenizer) -> None:
    free = ToolSpec(name="f", parameters={"type": "object"})
    assert may_be_whole(tokenizer, call(), free)
    assert may_be_whole(tokenizer, call(a="b", c="1"), free)
    bare = ToolSpec(name="f", parameters={"type": "object", "properties": {}, "additionalProperties": False})
    assert may_be_whole(tokenizer, call(), bare)
    assert not may_be_whole(tokenizer, call(a="b"), bare)
