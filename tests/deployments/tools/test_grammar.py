"""What the grammar of an answer lets through, for every format, by the library that holds answers to it."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, StructTag, grammar_from
from tokenizers import AddedToken, Tokenizer

from deployments.generation import ToolSpec
from deployments.stream.reasoning import THINK
from deployments.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, ToolFormat
from deployments.tools.grammar import JSON_STYLE, CallRules, write_grammar
from engine.sampling.grammar_tokenizer import read_tokenizer
from tests.deployments.tools.test_parser import written
from tests.deployments.trained_tokenizers import byte_level

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec(name="f", parameters=SCHEMA), ToolSpec(name="get_x", parameters={"type": "object"}))
NAMES = frozenset({"f", "get_x"})
NOTE = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
CONTENT = LLMatcher.grammar_from_json_schema(NOTE, defaults=JSON_STYLE)
CALL = ("f", '{"city": "Paris"}')


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer(Path("models/stdlib-chat/tokenizer.json").read_text())


def is_whole(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """Whether the text may be the whole answer."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def rules(tool_format: ToolFormat, **changes: Any) -> CallRules:
    return CallRules(**{"tool_format": tool_format, "tools": TOOLS, "callable_names": NAMES} | changes)


TAG = StructTag(trigger="<call", begin="<call>", grammar=NOTE, end="</call>")


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (CONTENT, '{"note": "x"}', "{}"),
        (LLMatcher.grammar_from_regex("yes|no"), "no", "perhaps"),
        (grammar_from("choice", '["yes", "no"]'), "no", "perhaps"),
        (grammar_from("grammar", 'start: "a" | "b" start'), "bba", "bb"),
        (grammar_from("grammar", 'root ::= "a" | "b" root'), "bba", "bb"),
        (StructTag.to_grammar([TAG], assume_special=False), 'Hm. <call>{"note": "x"}</call> So.', "<call>{}</call>"),
    ],
    ids=["schema", "regex", "choice", "lark", "gbnf", "tags"],
)
def test_content_of_every_kind_follows_its_grammar_behind_thoughts(
    tokenizer: LLTokenizer, content: str, good: str, bad: str
) -> None:
    """Those that are no JSON made the requests of a reasoning model fail."""
    for thoughts in ("", "<think>\nhm\n</think>\n\n", "hm\n</think>\n\n"):
        has_begun = thoughts.startswith("hm")
        grammar = write_grammar({}, thinking=THINK, has_begun=has_begun, content=content)
        assert is_whole(tokenizer, grammar, thoughts + good)
        assert not is_whole(tokenizer, grammar, thoughts + bad)


def test_space_passes_before_content_only_behind_thoughts(tokenizer: LLTokenizer) -> None:
    """Without thoughts it is shown, and a model that gave none answered ` yes` where the choices were yes and no."""
    choice = grammar_from("choice", '["yes", "no"]')
    grammar = write_grammar({}, thinking=THINK, content=choice)
    assert is_whole(tokenizer, grammar, "<think>hm</think>\n yes")
    assert not is_whole(tokenizer, grammar, " yes")
    assert is_whole(tokenizer, write_grammar({}, thinking=THINK, has_begun=True, content=choice), "hm</think>\n yes")


@pytest.mark.parametrize(("is_required", "has_content"), product([False, True], [False, True]))
def test_llama_may_say_of_which_type_its_calls_are(
    tokenizer: LLTokenizer, is_required: bool, has_content: bool
) -> None:
    """Its models copy that from the definitions of the tools, and their calls stayed text."""
    call = '{"type": "function", "name": "f", "parameters": {"city": "Paris"}}'
    calls = rules(LLAMA3, is_required=is_required)
    grammar = write_grammar({}, calls=calls, content=CONTENT if has_content else None)
    passes = {
        call: True,
        f'{call}; {{"name": "get_x", "parameters": {{}}}}': True,
        f"{call}; {call}": True,
        call.replace("city", "town"): False,
        call[:-1]: False,
        call.replace("function", "object"): not is_required and not has_content,
    }
    for text, expected in passes.items():
        assert is_whole(tokenizer, grammar, text) == expected, text


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda tool_format: tool_format.name)
@pytest.mark.parametrize("thoughts", ["", "<think>\nhm <tool\n</think>\n\n", "hm\n</think>\n\n"])
@pytest.mark.parametrize(("is_required", "has_content"), product([False, True], [False, True]))
def test_only_valid_calls_and_the_content_asked_for_pass(
    tokenizer: LLTokenizer, tool_format: ToolFormat, thoughts: str, is_required: bool, has_content: bool
) -> None:
    grammar = write_grammar(
        {},
        thinking=THINK if thoughts else None,
        has_begun=not thoughts.startswith("<think>"),
        calls=rules(tool_format, is_required=is_required),
        content=CONTENT if has_content else None,
    )
    call = written(tool_format, [CALL])
    passes = {
        call: True,
        written(tool_format, [CALL, ("get_x", "{}")], " "): True,
        written(tool_format, [("f", '{"town": "Paris"}')]): False,
        written(tool_format, [("g", "{}")]): tool_format.is_alone and not (is_required or has_content),
        call[: call.index("Paris")]: False,
        "Plain text.": not is_required and not has_content,
    }
    if has_content or not tool_format.is_alone:
        passes |= dict.fromkeys(('{"note": "x"}', ' {\n "note" : "x"}'), not is_required)
    if not tool_format.is_alone:
        passes[f"Let me see.\n{call}"] = not is_required and not has_content
    for text, expected in passes.items():
        assert is_whole(tokenizer, grammar, thoughts + text) == expected, text


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda tool_format: tool_format.name)
def test_no_call_passes_where_none_is_allowed(tokenizer: LLTokenizer, tool_format: ToolFormat) -> None:
    grammar = write_grammar({}, calls=rules(tool_format, callable_names=frozenset()))
    assert is_whole(tokenizer, grammar, 'Say {"name": 1}.')
    assert not is_whole(tokenizer, grammar, written(tool_format, [CALL]))


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda tool_format: tool_format.name)
def test_one_call_alone_passes_where_they_are_not_parallel(tokenizer: LLTokenizer, tool_format: ToolFormat) -> None:
    grammar = write_grammar({}, calls=rules(tool_format, is_parallel=False, callable_names=frozenset({"f"})))
    assert is_whole(tokenizer, grammar, written(tool_format, [CALL]))
    assert not is_whole(tokenizer, grammar, written(tool_format, [CALL, CALL]))
    assert not is_whole(tokenizer, grammar, written(tool_format, [CALL])[:-3])


@pytest.mark.parametrize("name", ["json", "llama3", "xlam"])
def test_content_may_begin_like_a_call_as_far_as_it_is_none(tokenizer: LLTokenizer, name: str) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["f", "Ann"]}}, "additionalProperties": False}
    content = LLMatcher.grammar_from_json_schema(schema, defaults=JSON_STYLE)
    grammar = write_grammar({}, calls=rules(FORMATS[name]), content=content)
    spread = written(FORMATS[name], [CALL]).replace(":", " : ").replace("{", "{ ")
    for text in ('{"name": "f"}', '{"name": "Ann"}', written(FORMATS[name], [CALL, CALL]), spread):
        assert is_whole(tokenizer, grammar, text), text
    assert not is_whole(tokenizer, grammar, '{"name": "f", "city": "Paris"}')
    assert not is_whole(tokenizer, grammar, '{"name": "g"}')


@pytest.mark.parametrize("num", [8, 9, 40])
def test_free_text_is_no_call_however_much_white_space_is_in_its_head(tokenizer: LLTokenizer, num: int) -> None:
    """With more of it than a call may have it passed as text, and was read as a call that no schema holds."""
    text = written(JSON, [("f", '{"town": 1}')]).replace("{", "{" + " " * num, 1)
    assert not is_whole(tokenizer, write_grammar({}, calls=rules(JSON)), text)
    text = f"{' ' * num}<think>hm"
    assert not is_whole(tokenizer, write_grammar({}, thinking=THINK, calls=rules(HERMES)), text)


def test_what_may_come_before_calls_makes_no_text_of_them(tokenizer: LLTokenizer) -> None:
    call = written(LLAMA3, [("f", '{"town": 1}')])
    for content in (None, CONTENT):
        grammar = write_grammar({}, calls=rules(LLAMA3), content=content)
        assert not is_whole(tokenizer, grammar, f"{LLAMA3.silent}{call}")
    assert is_whole(tokenizer, write_grammar({}, calls=rules(LLAMA3)), f"{LLAMA3.silent}.{call}")


def test_thoughts_and_what_may_come_before_calls_are_asked_for_by_id() -> None:
    tokenizer_json = json.loads(Path("models/stdlib-chat/tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"] if token["special"]}
    first, second = [token_id for mark, token_id in special.items() if mark in ("<|user|>", "<|assistant|>")]
    tokenizer = LLTokenizer(json.dumps(tokenizer_json))
    call = tokenizer.tokenize_str(written(LLAMA3, [CALL]))
    hm = tokenizer.tokenize_str("hm")
    ids = {THINK.begin: first, THINK.end: second, LLAMA3.silent: first}
    silent = write_grammar(ids, calls=rules(LLAMA3, is_required=True))
    thinking = write_grammar(ids, thinking=THINK, calls=rules(LLAMA3, is_required=True))
    for grammar, token_ids, passes in (
        (silent, [first, *call], True),
        (silent, call, True),
        (silent, [second, *call], False),
        (thinking, [first, *hm, second, *call], True),
        (thinking, [first, *hm, *call], False),
    ):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()) == passes


def test_marks_that_are_special_tokens_are_asked_for_by_id() -> None:
    tokenizer_json = json.loads(Path("models/stdlib-chat/tokenizer.json").read_text())
    special = {token["content"]: token["id"] for token in tokenizer_json["added_tokens"] if token["special"]}
    mark, token_id = "<|user|>", special["<|user|>"]
    tokenizer = LLTokenizer(json.dumps(tokenizer_json))
    tool_format = ToolFormat(name="test", opening=(mark,), after_arguments=("}",))
    grammar = write_grammar(special, calls=rules(tool_format))
    call = tokenizer.tokenize_str('{"name": "f", "arguments": {"city": "x"}}')
    for lead, spelling, passes in (("", [token_id], True), ("Hm. ", [token_id], True), ("", [], True)):
        matcher = LLMatcher(tokenizer, grammar, log_level=0)
        token_ids = tokenizer.tokenize_str(lead) + spelling + call
        assert (matcher.try_consume_tokens(token_ids) == len(token_ids)) == passes


@pytest.mark.parametrize("is_required", [False, True])
def test_marks_that_are_tokens_but_not_special_are_written_as_these_tokens(is_required: bool) -> None:
    """Qwen and the distills of R1 have such marks; their models had to spell them out, which they never do."""
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    model_s = Tokenizer.from_str(byte_level().to_str())
    model_s.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in marks])
    answer = "<think>\nhm\n</think>\n\n" + written(HERMES, [CALL])
    token_ids = model_s.encode(answer, add_special_tokens=False).ids
    assert set(map(model_s.token_to_id, marks)) <= set(token_ids)
    library_s = read_tokenizer(model_s.to_str(), model_s.get_vocab_size(), [2])
    grammar = write_grammar({}, thinking=THINK, calls=rules(HERMES, is_required=is_required))
    matcher = LLMatcher(library_s, grammar, log_level=0)
    assert matcher.try_consume_tokens(token_ids) == len(token_ids)
    assert matcher.is_accepting()


def test_the_library_takes_a_grammar_for_every_tool_there_may_be() -> None:
    tools = tuple(ToolSpec(name=f"tool_{index}", parameters=SCHEMA) for index in range(128))
    for tool_format in (HERMES, MISTRAL):
        grammar = write_grammar(
            {}, calls=CallRules(tool_format=tool_format, tools=tools, callable_names=frozenset(t.name for t in tools))
        )
        assert not LLMatcher.validate_grammar(grammar)
