"""What the grammar of a harmony answer lets through, by the library that holds answers to it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from deployments.generation import ToolSpec, ToolUse
from deployments.stream.harmony import MARKS
from deployments.tools.harmony_grammar import write_harmony

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec(name="f", parameters=SCHEMA), ToolSpec(name="get-x", parameters={"type": "object"}))
USE = ToolUse(tools=TOOLS, callable_names=frozenset({"f", "get-x"}))
CONTENT = LLMatcher.grammar_from_regex("yes|no")
FINAL = "<|channel|>final<|message|>"
THOUGHTS = "<|channel|>analysis<|message|>Hm, final?<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I'll look.<|end|><|start|>assistant"
CALLS = (
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Paris"}',
    '<|channel|>commentary to=functions.f<|message|>{"city": "Paris"}',
    ' to=functions.f<|channel|>commentary json<|message|>{"city": "Paris"}',
    " to=functions.get-x<|channel|>commentary <|constrain|>json<|message|>{}",
)
BAD_CALLS = (
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"town": "Paris"}',
    "<|channel|>commentary to=functions.g<|message|>{}",
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Par',
)


@pytest.fixture(scope="module")
def special_ids() -> dict[str, int]:
    known = json.loads(Path("models/stdlib-chat/tokenizer.json").read_text())
    first = 1 + max([*known["model"]["vocab"].values(), *(token["id"] for token in known["added_tokens"])])
    return {mark: first + place for place, mark in enumerate(MARKS)}


@pytest.fixture(scope="module")
def tokenizer(special_ids: dict[str, int]) -> LLTokenizer:
    known = json.loads(Path("models/stdlib-chat/tokenizer.json").read_text())
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    known["added_tokens"] += [{"id": token_id, "content": mark, **usual} for mark, token_id in special_ids.items()]
    return LLTokenizer(json.dumps(known))


def is_whole(tokenizer: LLTokenizer, special_ids: dict[str, int], grammar: str, text: str) -> bool:
    """Whether the text may be the whole answer, its marks being special tokens."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids: list[int] = []
    for piece in re.split("(" + "|".join(map(re.escape, MARKS)) + ")", text):
        token_ids += [special_ids[piece]] if piece in special_ids else tokenizer.tokenize_str(piece)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@pytest.mark.parametrize("lead", ["", THOUGHTS, THOUGHTS + PREAMBLE])
def test_calls_are_those_of_tools_with_valid_arguments(
    tokenizer: LLTokenizer, special_ids: dict[str, int], lead: str
) -> None:
    for is_required in (False, True):
        use = ToolUse(tools=TOOLS, callable_names=USE.callable_names, is_required=is_required)
        grammar = write_harmony(special_ids, use, None)
        for text in CALLS:
            assert is_whole(tokenizer, special_ids, grammar, lead + text), text
        for text in BAD_CALLS:
            assert not is_whole(tokenizer, special_ids, grammar, lead + text), text
        assert is_whole(tokenizer, special_ids, grammar, f"{lead}{FINAL}Anything.") != is_required


@pytest.mark.parametrize("lead", ["", THOUGHTS])
def test_a_grammar_of_the_content_holds_in_the_final_channel_alone(
    tokenizer: LLTokenizer, special_ids: dict[str, int], lead: str
) -> None:
    for use in (None, USE):
        grammar = write_harmony(special_ids, use, CONTENT)
        assert is_whole(tokenizer, special_ids, grammar, f"{lead}{FINAL}yes")
        assert not is_whole(tokenizer, special_ids, grammar, f"{lead}{FINAL}perhaps")
        assert is_whole(tokenizer, special_ids, grammar, lead + CALLS[0]) == (use is not None)
        assert not is_whole(tokenizer, special_ids, grammar, THOUGHTS)


def test_nothing_is_said_before_content_that_has_a_grammar(tokenizer: LLTokenizer, special_ids: dict[str, int]) -> None:
    """A preamble is content: with one before it, an answer that was to be JSON was none."""
    for use in (None, USE):
        grammar = write_harmony(special_ids, use, CONTENT)
        assert not is_whole(tokenizer, special_ids, grammar, f"{PREAMBLE}{FINAL}yes")
        assert not is_whole(tokenizer, special_ids, grammar, f"{THOUGHTS}{PREAMBLE}{FINAL}yes")
    # A call that is required leaves no room for such content.
    required = ToolUse(tools=TOOLS, callable_names=USE.callable_names, is_required=True)
    assert is_whole(tokenizer, special_ids, write_harmony(special_ids, required, CONTENT), PREAMBLE + CALLS[0])


def test_no_call_passes_where_none_is_allowed(tokenizer: LLTokenizer, special_ids: dict[str, int]) -> None:
    grammar = write_harmony(special_ids, ToolUse(tools=TOOLS, callable_names=frozenset()), None)
    assert is_whole(tokenizer, special_ids, grammar, f"{FINAL}Anything.")
    assert not any(is_whole(tokenizer, special_ids, grammar, text) for text in CALLS)
