"""All that a prompt consists of counts as its size, wherever a chat has it."""

from __future__ import annotations

import pytest

from deployments.generation import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt, ToolCall, ToolSpec
from deployments.prompt_texts import depth_of, num_chars, object_in, texts_in

CALL = ToolCall(call_id="1", name="f", arguments="12345")
TOOL = ToolSpec(name="f", description="1234567", parameters={"a": ["bc", {"d": 1}]})


@pytest.mark.parametrize(
    ("prompt", "size"),
    [
        (TextPrompt(text="123", suffix="45"), 5),
        (TokenPrompt(token_ids=(1, 2, 3)), 12),
        (ChatPrompt(messages=(ChatMessage(role="user", content="123"),)), 3),
        (ChatPrompt(messages=(ChatMessage(role="assistant", content="1", reasoning="23", tool_calls=(CALL,)),)), 8),
        (ChatPrompt(messages=(ChatMessage(role="user", content="1"),), tools=(TOOL,)), 12),
        (ChatPrompt(messages=(ChatMessage(role="user", content="1"),), template_options={"documents": ["23"]}), 12),
    ],
)
def test_every_part_of_a_prompt_counts(prompt: Prompt, size: int) -> None:
    assert num_chars(prompt) == size


def test_an_object_is_told_from_other_texts() -> None:
    assert object_in('{"a": 36893488147419103232}') == {"a": 1 << 65}
    assert [object_in(text) for text in ("", "[1]", '{"a": ', '{"a": ' * 10**5)] == [None] * 4


def test_texts_are_found_in_nested_values() -> None:
    assert list(texts_in({"a": [1, "b", {"c": None}], "d": True})) == ["a", "b", "c", "d"]


@pytest.mark.parametrize(("value", "depth"), [("a", 0), ([], 0), ({"a": []}, 1), ([1, {"a": [[2]]}, 3], 4)])
def test_levels_that_hold_anything_count_as_deep(value: object, depth: int) -> None:
    assert depth_of(value) == depth
