from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from app.schemas.chat import ChatCompletionRequest
from app.schemas.completions import CompletionRequest
from app.settings import LimitSettings
from app.translation.bounds import check_json
from app.translation.structure import answer_grammar
from deployments.generation import Grammar
from engine.errors import RequestError

LIMITS = LimitSettings(max_schema_chars=2000, max_schema_depth=12)
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {
    "type": "structural_tag",
    "structures": [{"begin": "<call>", "schema": SCHEMA, "end": "</call>"}],
    "triggers": ["<call"],
}


def of_chat(**fields: Any) -> Grammar | None:
    question = [{"role": "user", "content": "Hi"}]
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": question, **fields})
    return answer_grammar(body, LIMITS)


def of_text(wanted: dict[str, Any], field: str = "structured_outputs") -> Grammar | None:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", field: wanted})
    return answer_grammar(body, LIMITS)


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}


def test_a_text_has_the_format_that_a_chat_has() -> None:
    for wanted in ({"type": "text"}, {"type": "json_object"}, json_schema({"type": "array"})):
        assert of_text(wanted, "response_format") == of_chat(response_format=wanted)


def test_free_text_has_no_grammar() -> None:
    assert of_chat() is None
    assert of_chat(response_format={"type": "text"}) is None
    assert of_chat(response_format=None, structured_outputs=None) is None


SECRET = {"type": "object", "properties": {"key": {"type": "string", "format": "password", "writeOnly": True}}}


@pytest.mark.parametrize("wanted", [{"type": "json_object"}, json_schema(SCHEMA), json_schema({}), json_schema(SECRET)])
def test_a_response_format_becomes_a_grammar_that_can_be_followed(wanted: dict[str, Any]) -> None:
    grammar = of_chat(response_format=wanted)
    assert grammar is not None
    assert grammar.field == "response_format"
    assert LLMatcher.validate_grammar(grammar.source) == ""


@pytest.mark.parametrize(
    "wanted",
    [
        {"json": SCHEMA},
        {"regex": "[a-z]+/[0-9]"},
        {"choice": ["yes", 'n"o', "é\n"]},
        {"grammar": 'start: "a" | "b" start'},
        {"grammar": 'root ::= "a" | "b" root'},
        {"structural_tag": TAG},
        {"structural_tag": TAG | {"structures": [{"begin": "<call>", "schema": SECRET, "end": "</call>"}]}},
    ],
    ids=lambda wanted: next(iter(wanted)),
)
def test_every_way_to_say_it_becomes_a_grammar_that_can_be_followed(wanted: dict[str, Any]) -> None:
    grammar = of_text(wanted)
    assert grammar is not None
    assert grammar.field == f"structured_outputs.{next(iter(wanted))}"
    assert LLMatcher.validate_grammar(grammar.source) == ""
    assert of_chat(structured_outputs=wanted) == grammar


@pytest.mark.parametrize("gap", ["\n", "\r\n", "\n\t", "\n "])
def test_empty_lines_cost_no_time(gap: str) -> None:
    """64 kB of them held the process for 40 s: the library looks for Lark's marks in quadratic time."""
    limits = LimitSettings(max_schema_chars=1_000_000)
    wanted = {"grammar": 'root ::= "a"' + gap * 300_000}
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "structured_outputs": wanted})
    assert answer_grammar(body, limits) is not None


def test_a_grammar_that_is_nested_too_deeply_is_refused() -> None:
    limits = LimitSettings(max_schema_chars=1_000_000)
    wanted = {"grammar": "root ::= " + "(" * 5000 + '"a"' + ")" * 5000}
    body = CompletionRequest.model_validate({"model": "m", "prompt": "x", "structured_outputs": wanted})
    with pytest.raises(RequestError, match="not a valid grammar"):
        answer_grammar(body, limits)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('root ::= "\\', "it could not be read"),
        ('root ::= "a"{²}', "it could not be read"),
        ("root ::= " + "(" * 900, "it could not be read"),
        ("root ::= x", "Rule 'x' not found"),
        ('a ::= "x"', "No 'root' rule found"),
        ('root ::= "a"\nb ::= "\\uzzzz"', "Invalid .* at line 2"),
    ],
)
def test_why_a_grammar_cannot_be_read_is_told_in_words_of_the_grammar(grammar: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"'structured_outputs.grammar' is not a valid grammar: {reason}"):
        of_text({"grammar": grammar})


def test_the_rules_of_gbnf_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library took seconds for 3,000, each of which referred to the next."""
    monkeypatch.setattr("app.translation.structure.MAX_GBNF_RULES", 3)
    rules = ["root ::= a b", 'a ::= "x"', 'b ::= "y"']
    assert of_text({"grammar": "\n".join(rules)}) is not None
    with pytest.raises(RequestError, match="accepts at most 3 rules in GBNF; 4 were"):
        of_text({"grammar": "\n".join([*rules, 'c ::= "z"'])})


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r'"caf\u00e9"', "café"),
        (r'"\U0001f642\u4e2d\u2028"', "🙂中\u2028"),
        (r"[\u00e0-\u00ff]+", "éà"),
        (r'"\u0022\u005c\u000a\u0000"', '"\\\n\0'),
        (r"[\u005e\u005d\u002d\u002f\u005c]+", "^]-/\\"),
        (r'[^\u0022\u000a]+ "\""', 'ab"'),
        (r'"\\u00e9"', r"\u00e9"),
    ],
)
def test_escapes_of_gbnf_are_the_characters_that_they_number(expression: str, text: str) -> None:
    grammar = of_text({"grammar": f"root ::= {expression}"})
    assert grammar is not None
    assert LLMatcher.validate_grammar(grammar.source) == ""
    matcher, token_ids = LLMatcher(LLTokenizer("byte"), grammar.source), list(text.encode())
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()


def nested(depth: int) -> Any:
    schema: Any = {"type": "null"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"response_format": json_schema(nested(12))}, "response_format"),
        ({"response_format": json_schema({"enum": ["x" * 2000]})}, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 3, "max_tokens": 9}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "bad_words": ["x"]}, "bad_words"),
        ({"structured_outputs": {"regex": "a" * 2001}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["a" * 2001]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": "a" * 2001}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": "root ::= ::="}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"json": nested(13)}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": TAG | {"triggers": ["["]}}}, "structured_outputs.structural_tag"),
    ],
)
def test_what_is_too_much_or_contradicts_itself_is_refused_by_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        of_chat(**fields)
    assert refused.value.field == field


def test_the_deepest_schema_is_measured_without_recursion() -> None:
    with pytest.raises(RequestError, match="nested 20001 levels deep"):
        check_json(nested(20_000), LIMITS, field="x")


@pytest.mark.parametrize("wanted", [{"json": SCHEMA}, {"structural_tag": TAG}])
def test_json_has_as_much_white_space_as_people_write(wanted: dict[str, Any]) -> None:
    grammar = of_text(wanted)
    assert grammar is not None
    tokenizer = LLTokenizer("byte")

    def num_refused(num_spaces: int) -> int:
        text = "{" + " " * num_spaces + '"a": 1}'
        text = f"Well <call>{text}</call>" if "structural_tag" in wanted else text
        return len(text) - LLMatcher(tokenizer, grammar.source).try_consume_tokens(tokenizer.tokenize_str(text))

    assert num_refused(24) == 0
    assert num_refused(25) > 0
