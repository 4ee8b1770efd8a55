"""What an answer is held to, and what its text comes apart into; and whole answers of an engine that is so held."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from llguidance import LLMatcher

from app.translation.streaming import joined_calls
from deployments.gateway.answer_shape import AnswerShape, tail_of
from deployments.gateway.dialect import Dialect
from deployments.gateway.gateway import Gateway
from deployments.generation import EndReason, Finished, Grammar, TextDelta, TextPrompt, ToolSpec, ToolUse
from deployments.stream.reasoning import THINK
from deployments.tokenizer.text_codec import TextCodec
from deployments.tools.formats import FORMATS, HERMES, JSON
from engine.errors import GrammarError, RequestError
from tests.deployments.conftest import Serving
from tests.deployments.in_process import ask, events_of

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec(name="f", parameters=SCHEMA), ToolSpec(name="none"))
USE = ToolUse(tools=TOOLS, callable_names=frozenset({"f", "none"}))
CHOICE = Grammar(source=LLMatcher.grammar_from_regex("yes|no"), field="structured_outputs")
PLAIN = Dialect(tool_format=JSON, reasoning=None, special_ids={})
THINKING = Dialect(tool_format=HERMES, reasoning=THINK, special_ids={"<tool_call>": 7})

OpenGateway = Callable[..., Awaitable[Gateway]]


async def test_plain_text_is_held_to_nothing_and_stays_whole() -> None:
    shape = AnswerShape(ask(), PLAIN, "")
    assert await shape.grammar() is None
    assert shape.shown == {}
    assert shape.counter() is None
    parts = shape.parts()
    assert parts.feed('{"name": "f"') == ("", '{"name": "f"', ())
    assert parts.close() == ("", "", ())


async def test_thoughts_alone_need_no_grammar_and_come_apart() -> None:
    shape = AnswerShape(ask(), THINKING, "<|assistant|><think>\n")
    assert await shape.grammar() is None
    assert shape.shown == {7: "<tool_call>"}
    assert shape.parts().feed("Hm.</think> Yes.") == ("Hm.", "Yes.", ())


async def test_a_text_prompt_has_neither_thoughts_nor_marks() -> None:
    shape = AnswerShape(ask(TextPrompt(text="a"), grammar=CHOICE), THINKING, "<think>")
    assert await shape.grammar() == CHOICE.source
    assert shape.shown == {}
    assert shape.parts().feed("<think>") == ("", "<think>", ())


@pytest.mark.parametrize("tail", ["<think>\n", ""])
async def test_a_grammar_follows_the_thoughts(tail: str) -> None:
    source = await AnswerShape(ask(grammar=CHOICE), THINKING, tail).grammar()
    assert source is not None
    assert source != CHOICE.source
    assert json.loads(source)["grammars"][1]["name"] == "content"


async def test_a_template_that_takes_one_call_a_turn_gets_no_more() -> None:
    """Two were written, and the turn with both, sent back with their results, was refused by the template."""
    grammars = [
        await AnswerShape(ask(tool_use=USE), replace(PLAIN, takes_several=several), "").grammar()
        for several in (True, False)
    ]
    alone = await AnswerShape(ask(tool_use=replace(USE, is_parallel=False)), PLAIN, "").grammar()
    assert grammars[1] == alone != grammars[0]


async def test_json_beside_calls_that_are_json_is_refused_by_field() -> None:
    with pytest.raises(RequestError) as refused:
        await AnswerShape(ask(grammar=CHOICE, tool_use=USE), PLAIN, "").grammar()
    assert refused.value.field == "structured_outputs"
    for use in (replace(USE, is_required=True), replace(USE, callable_names=frozenset())):
        assert await AnswerShape(ask(grammar=CHOICE, tool_use=use), PLAIN, "").grammar()


def test_what_the_engine_cannot_follow_is_refused_by_the_field_that_asked_for_it() -> None:
    for request, field in ((ask(grammar=CHOICE), "structured_outputs"), (ask(tool_use=USE), "tools")):
        refused = AnswerShape(request, PLAIN, "").refused(GrammarError("too many states"))
        assert (refused.field, refused.message) == (field, f"'{field}' cannot be followed: too many states")


async def test_tools_of_a_model_with_calls_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(RequestError, match="tool_format") as refused:
        await AnswerShape(ask(tool_use=USE), replace(PLAIN, tool_format=None), "").grammar()
    assert refused.value.field == "tools"


async def test_a_schema_that_cannot_be_followed_is_refused_where_it_is_strict_and_else_lets_any_object_pass() -> None:
    odd = ToolSpec(name="odd", parameters={"type": "object", "properties": {"a": {"type": "strange"}}})
    use = replace(USE, tools=(*TOOLS, odd), callable_names=frozenset({"odd"}))
    assert await AnswerShape(ask(tool_use=use), PLAIN, "").grammar()
    use = replace(use, tools=(*TOOLS, replace(odd, is_strict=True)))
    with pytest.raises(RequestError) as refused:
        await AnswerShape(ask(tool_use=use), PLAIN, "").grammar()
    assert refused.value.field == "tools[2].function.parameters"


def test_the_end_of_a_prompt_is_read_from_its_tokens() -> None:
    assert tail_of([b"a\xc3", b"\xa9<think>", b"\n"]) == "aé<think>\n"
    assert tail_of([b"\x80b"]) == "\ufffdb"


@pytest.mark.parametrize("name", FORMATS)
async def test_calls_that_are_required_come_valid_in_every_format(
    gateway: OpenGateway, serving: Serving, name: str
) -> None:
    opened = await gateway(model=replace(serving.model, tool_format=name))
    use = replace(USE, is_required=True, is_parallel=False, callable_names=frozenset({"f"}))
    # Random weights would write white space wherever it may stand.
    spaces = (
        token_id
        for space in (" ", "\n", "\t", "\r")
        for token_id in TextCodec(serving.model.tokenizer_path).encode_text(space)
    )
    params = {"ignore_eos": False, "logit_bias": tuple((token_id, -100.0) for token_id in spaces)}
    events = await events_of(opened, ask(tool_use=use, max_tokens=160, params=params))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(delta.text for delta in deltas) == ""
    (call,) = joined_calls(piece for delta in deltas for piece in delta.calls)
    assert call.name == "f"
    assert json.loads(call.arguments) in ({"city": "Paris"}, {"city": "Rome"})
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is EndReason.TOOL_CALLS


async def test_a_grammar_that_takes_too_much_fails_every_answer_by_the_name_of_its_field(
    gateway: OpenGateway, serving: Serving
) -> None:
    opened, codec = await gateway(), TextCodec(serving.model.tokenizer_path)
    (z,) = codec.encode_text("z")
    # The first is refused as it is compiled, the second fails behind its first token, which is shown.
    for regex, num_events in (("q{1000000}", 0), ("a|z[a-z]q{1000000}", 2)):
        grammar = Grammar(source=LLMatcher.grammar_from_regex(regex), field="structured_outputs.regex")
        for _ in range(2):
            told = opened.generate(ask(grammar=grammar, params={"ignore_eos": False, "logit_bias": ((z, 100.0),)}))
            assert len([await anext(told) for _ in range(num_events)]) == num_events
            with pytest.raises(RequestError, match="too many expressions") as refused:
                await anext(told)
            assert refused.value.field == "structured_outputs.regex"
    await serving.replicas.until_idle()


async def test_a_call_that_is_cut_ends_by_its_length(gateway: OpenGateway) -> None:
    use = replace(USE, is_required=True)
    for max_tokens in (1, 8, 16):
        events = await events_of(
            await gateway(), ask(tool_use=use, max_tokens=max_tokens, params={"ignore_eos": False})
        )
        assert isinstance(events[-1], Finished)
        assert events[-1].reason is EndReason.LENGTH
        assert not any(event.text for event in events if isinstance(event, TextDelta))
