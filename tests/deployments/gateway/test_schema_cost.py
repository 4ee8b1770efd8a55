from __future__ import annotations

from typing import Any

import pytest

from deployments.gateway.schema_cost import MAX_ALTERNATIVES, MAX_NAME_PATTERNS, MAX_PATTERNS, reason_against

PATTERNS = f"More than {MAX_PATTERNS} patterns or formats apply to one string."
COMBINATIONS = f"More than {MAX_ALTERNATIVES} combinations of alternatives apply to one value."


def patterned(number: int) -> dict[str, Any]:
    return {"type": "string", "pattern": f".*{'a' * number}.*b{{5}}.*"}


MANY = [patterned(number) for number in range(MAX_PATTERNS + 1)]


def in_property(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": schema}}


def nested(schemas: list[Any], keyword: str) -> Any:
    first, *others = schemas
    inner = {keyword: [nested(others, keyword)]} if others else {}
    return first | inner


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": MANY},
        {"items": {"allOf": MANY}},
        {"allOf": [in_property(schema) for schema in MANY]},
        {"allOf": [{"items": [{}, schema]} for schema in MANY]},
        {"allOf": [{"prefixItems": [{}], "items": schema} for schema in MANY]},
        {"allOf": [*({"additionalProperties": schema} for schema in MANY[1:]), in_property(MANY[0])]},
        {"allOf": [*({"patternProperties": {"^p": schema}} for schema in MANY[1:]), in_property(MANY[0])]},
        nested(MANY, "allOf"),
        nested(MANY, "anyOf"),
        nested(MANY, "oneOf"),
        {"allOf": [{"anyOf": [{"type": "null"}, schema]} for schema in MANY]},
        {"$defs": {"a": {"allOf": MANY[1:]}}, "items": MANY[0] | {"$ref": "#/$defs/a"}},
        {"$defs": {"a/b": MANY}, "allOf": [{"$ref": f"#/$defs/a~1b/{place}"} for place in range(len(MANY))]},
    ],
)
def test_patterns_that_meet_in_one_string_are_bounded_however_they_meet(schema: Any) -> None:
    """The grammar library takes three times as long with each, so that 732 characters kept a thread for 12 s."""
    assert reason_against(schema) == PATTERNS


def test_patterns_of_a_recursive_schema_that_meet_deep_within_are_found() -> None:
    tower: dict[str, Any] = {}
    for schema in MANY:
        tower = {"anyOf": [schema, in_property(tower)]}
    node = {"allOf": [in_property({"$ref": "#/$defs/node"}), in_property(tower)]}
    assert reason_against({"$defs": {"node": node}, "$ref": "#/$defs/node"}) != ""


def test_alternatives_that_multiply_are_bounded() -> None:
    """Each doubled the time or worse: twelve of them took half a second."""
    pairs = [{"anyOf": [{"required": [f"a{number}"]}, {"required": [f"b{number}"]}]} for number in range(9)]
    assert reason_against({"allOf": pairs}) == COMBINATIONS
    assert reason_against({"allOf": [in_property(pair) for pair in pairs]}) == COMBINATIONS
    assert reason_against({"allOf": pairs[1:]}) == ""


def test_what_does_not_meet_is_not_counted_together() -> None:
    fields = {f"f{number}": {"anyOf": [patterned(number), {"type": "null"}]} for number in range(50)}
    base = {"type": "object", "properties": fields}
    tree = in_property({"type": "array", "items": {"$ref": "#/$defs/tree"}})
    for schema in (
        base,
        {"anyOf": [in_property(schema) for schema in fields.values()] * 10},
        {"patternProperties": {f"^{name}$": schema for name, schema in fields.items()}},
        {"$defs": {"base": base, "tree": {"allOf": [{"$ref": "#/$defs/base"}, tree]}}, "$ref": "#/$defs/tree"},
        {"allOf": [patterned(1)] * 20},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a", "properties": fields},
    ):
        assert reason_against(schema) == ""


@pytest.mark.parametrize("reference", ["#name", "other", "/schema#/$defs/a"])
def test_references_whose_target_cannot_be_told_are_refused_only_beside_many_patterns(reference: str) -> None:
    schema = {"$ref": reference, "$defs": {"a": {"$anchor": "name"}}}
    assert reason_against(schema) == ""
    assert "references must begin with '#/'" in reason_against(schema | {"items": {"anyOf": MANY}})
    inner = {"$ref": "#/$defs/a", "$defs": {"a": {"$id": "other", "anyOf": MANY}}}
    assert "no inner schema may have an '$id'" in reason_against(inner)


def test_a_schema_that_combines_too_much_of_everything_is_refused_soon() -> None:
    wide = [{"properties": {f"p{number}_{name}": {} for name in range(20)}} for number in range(200)]
    assert "too many ways" in reason_against({"allOf": [*wide, {"items": {"anyOf": MANY}}]})


@pytest.mark.parametrize(
    "schema", [None, True, 3, [], {"allOf": 3, "anyOf": {}, "$ref": 1, "properties": [], "items": 2}]
)
def test_what_is_no_schema_is_left_to_the_library(schema: Any) -> None:
    assert reason_against(schema) == ""
    assert reason_against({"anyOf": MANY, "allOf": [schema], "$ref": "#/nothing/0"}) == ""


def test_a_reference_to_an_item_that_no_list_has_is_left_to_the_library() -> None:
    """Python reads no number of 5,000 digits, which made it a server's error."""
    reference = {"$ref": f"#/allOf/{'9' * 5000}"}
    assert reason_against({"allOf": [{}], "properties": {"a": {"anyOf": MANY}, "b": reference}}) == ""


def test_patterns_of_names_are_bounded_for_each_object() -> None:
    """Each is compared with all others: 400 of them, in 5 KB, took 10 s, and 800 more than a minute."""

    def named(count: int) -> dict[str, Any]:
        return {"patternProperties": {f"^{number}$": {} for number in range(count)}}

    most = MAX_NAME_PATTERNS
    assert reason_against(named(most)) == ""
    assert reason_against({"properties": {name: named(most) for name in "abc"}}) == ""
    expected = f"More than {most} patterns of names apply to one object."
    assert reason_against(named(most + 1)) == expected
    other = {"patternProperties": {"^x$": {}}}
    assert reason_against({"properties": {"a": {"allOf": [named(most), other]}}}) == expected
