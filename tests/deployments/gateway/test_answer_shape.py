"""What an answer is held to, and what its text comes apart into; and whole answers of an engine that is so held."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher

from app.translation.streaming import joined_calls
from deployments.answer_events import EndReason, Finished, TextDelta
from deployments.config import ChannelConfig, ModelConfig
from deployments.gateway import grammars
from deployments.gateway.answer_shape import AnswerShape, shape_of
from deployments.gateway.dialect import Dialect
from deployments.gateway.gateway import Gateway
from deployments.generation import (
    ChatMessage,
    ChatPrompt,
    GenerationRequest,
    Grammar,
    TextPrompt,
    ToolCall,
    ToolSpec,
    ToolUse,
)
from deployments.stream.harmony import CHANNEL, END, MARKS, MESSAGE, SIGN_BY_MARK, START
from deployments.stream.reasoning import THINK
from deployments.tokenizer.text_codec import TextCodec
from deployments.tools.formats import FORMATS, HERMES, JSON
from engine.errors import GrammarError, RequestError
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import SECRET, ask, events_of
from tests.deployments.tiny_models import write_chat_model

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = (ToolSpec(name="f", parameters=SCHEMA), ToolSpec(name="none"))
USE = ToolUse(tools=TOOLS, callable_names=frozenset({"f", "none"}))
ANSWERS = ({"city": "Paris"}, {"city": "Rome"})
CHOICE = Grammar(source=LLMatcher.grammar_from_regex("yes|no"), field="structured_outputs")
PLAIN = Dialect(tool_format=JSON, reasoning=None, special_ids={})
THINKING = Dialect(tool_format=HERMES, reasoning=THINK, special_ids={"<tool_call>": 7})


async def test_plain_text_is_held_to_nothing_and_stays_whole() -> None:
    shape = shape_of(ask(), PLAIN, "")
    assert await shape.grammar() is None
    assert shape.shown == {}
    assert shape.counter() is None
    parts = shape.parts()
    assert parts.feed('{"name": "f"') == ("", '{"name": "f"', ())
    assert parts.close() == ("", "", ())


async def test_thoughts_alone_need_no_grammar_and_come_apart() -> None:
    shape = shape_of(ask(), THINKING, "<|assistant|><think>\n")
    assert await shape.grammar() is None
    assert shape.shown == {7: "<tool_call>"}
    assert shape.parts().feed("\nHm.</think> Yes.") == ("Hm.", "Yes.", ())


@pytest.mark.parametrize(
    ("begun", "expected"),
    [
        ("<think>\nHmm, so", (" it is 4.", "4")),
        ("<think>\nHmm.\n</think>\n\nSo", ("", " it is 4.</think>4")),
        ("One writes <think> and", ("", " it is 4.</think>4")),
    ],
)
def test_thoughts_that_a_continued_message_leaves_open_go_on(begun: str, expected: tuple[str, str]) -> None:
    """They were content, with the mark of their end in it; later, they lost the space before their first word."""
    turns = (ChatMessage(role="user", content="?"), ChatMessage(role="assistant", content=begun))
    shape = shape_of(ask(ChatPrompt(messages=turns, continues_final_message=True)), THINKING, begun)
    assert shape.parts().feed(" it is 4.</think>4") == (*expected, ())
    assert shape_of(ask(ChatPrompt(messages=turns)), THINKING, begun).parts().feed(" 4.") == ("", " 4.", ())


async def test_a_text_prompt_has_neither_thoughts_nor_marks() -> None:
    shape = shape_of(ask(TextPrompt(text="a"), grammar=CHOICE), THINKING, "<think>")
    assert await shape.grammar() == CHOICE.source
    assert shape.shown == {}
    assert shape.parts().feed("<think>") == ("", "<think>", ())


def test_content_that_a_grammar_holds_may_name_what_opens_a_call() -> None:
    """A string that ended with it lost the space before it."""
    answer = '{"note": "x <tool_call>"}'
    parts = shape_of(ask(grammar=CHOICE, tool_use=USE), replace(THINKING, reasoning=None), "").parts()
    assert parts.feed(answer) == ("", answer, ())


@pytest.mark.parametrize("tail", ["<think>\n", ""])
async def test_a_grammar_follows_the_thoughts(tail: str) -> None:
    source = await shape_of(ask(grammar=CHOICE), THINKING, tail).grammar()
    assert source is not None
    assert source != CHOICE.source
    assert json.loads(source)["grammars"][1]["name"] == "content"


async def test_a_template_that_takes_one_call_a_turn_gets_no_more() -> None:
    """Two were written, and the turn with both, sent back with their results, was refused by the template."""
    grammars = [
        await shape_of(ask(tool_use=USE), replace(PLAIN, takes_several=several), "").grammar()
        for several in (True, False)
    ]
    alone = await shape_of(ask(tool_use=replace(USE, is_parallel=False)), PLAIN, "").grammar()
    assert grammars[1] == alone != grammars[0]


@pytest.mark.parametrize("name", ["json", "llama3", "xlam"])
async def test_content_that_may_begin_as_a_call_in_plain_json_does_is_refused_by_field(name: str) -> None:
    """All content that had to be JSON was, and no agent with tools could give its answer in the shape asked for."""
    plain = replace(PLAIN, tool_format=FORMATS[name])
    any_json = Grammar(source=LLMatcher.grammar_from_json_schema({}), field="response_format")
    with pytest.raises(RequestError) as refused:
        await shape_of(ask(grammar=any_json, tool_use=USE), plain, "").grammar()
    assert refused.value.field == "response_format"
    for use in (replace(USE, is_required=True), replace(USE, callable_names=frozenset())):
        assert await shape_of(ask(grammar=any_json, tool_use=use), plain, "").grammar()
    city = Grammar(source=LLMatcher.grammar_from_json_schema(SCHEMA), field="response_format")
    assert await shape_of(ask(grammar=city, tool_use=USE), plain, "").grammar()


def test_what_the_engine_cannot_follow_is_refused_by_the_field_that_asked_for_it() -> None:
    for request, field in ((ask(grammar=CHOICE), "structured_outputs"), (ask(tool_use=USE), "tools")):
        refused = shape_of(request, PLAIN, "").refused(GrammarError("too many states"))
        assert (refused.field, refused.message) == (field, f"'{field}' cannot be followed: too many states")


async def test_tools_of_a_model_with_calls_of_an_unknown_kind_are_refused() -> None:
    with pytest.raises(RequestError, match="tool_format") as refused:
        await shape_of(ask(tool_use=USE), replace(PLAIN, tool_format=None), "").grammar()
    assert refused.value.field == "tools"


async def test_a_schema_that_cannot_be_followed_is_refused_where_it_is_strict_and_else_lets_any_object_pass() -> None:
    odd = ToolSpec(name="odd", parameters={"type": "object", "properties": {"a": {"type": "strange"}}})
    use = replace(USE, tools=(*TOOLS, odd), callable_names=frozenset({"odd"}))
    assert await shape_of(ask(tool_use=use), PLAIN, "").grammar()
    use = replace(use, tools=(*TOOLS, replace(odd, is_strict=True)))
    with pytest.raises(RequestError) as refused:
        await shape_of(ask(tool_use=use), PLAIN, "").grammar()
    assert refused.value.field == "tools[2].function.parameters"


async def test_a_strict_schema_that_is_no_list_of_parameters_is_refused_where_each_is_written_by_itself() -> None:
    tagged = replace(PLAIN, tool_format=FORMATS["qwen3_coder"])
    more = ToolSpec(name="more", parameters={"type": "object", "patternProperties": {"^a": {"type": "integer"}}})
    use = replace(USE, tools=(*TOOLS, more), callable_names=frozenset({"more"}))
    assert await shape_of(ask(tool_use=use), tagged, "").grammar()
    use = replace(use, tools=(*TOOLS, replace(more, is_strict=True)))
    assert await shape_of(ask(tool_use=use), PLAIN, "").grammar()
    with pytest.raises(RequestError, match="each argument separately") as refused:
        await shape_of(ask(tool_use=use), tagged, "").grammar()
    assert refused.value.field == "tools[2].function.parameters"


@pytest.mark.parametrize(
    ("own", "written", "expected"),
    [
        ({"path": {"type": "string", "format": "path"}}, "12345", "12345"),
        ({"path": {"type": "string", "format": "path"}}, 'a 5" pipe', 'a 5" pipe'),
        ({"path": {"type": "string", "format": "uuid4"}}, '"a"', "a"),
        # The grammar library knows no unique items, so that nothing is enforced.
        ({"path": {"type": "string", "minLength": 1}, "b": {"uniqueItems": True}}, "12345", "12345"),
        ({"path": {"type": "string", "minLength": 1}, "b": {"uniqueItems": True}}, 'a 5" pipe', 'a 5" pipe'),
        ({"path": {"type": "array", "uniqueItems": True}}, '["a"]', ["a"]),
        ({"path": {"type": "array", "uniqueItems": True}}, '5" 6', '5" 6'),
    ],
)
async def test_tagged_values_are_read_as_the_grammar_has_them_written(
    own: dict[str, Any], written: str, expected: object
) -> None:
    """Text became a number, and a call whose text had one quote never ended."""
    tool = ToolSpec(name="f", parameters={"type": "object", "properties": own})
    use = ToolUse(tools=(tool,), callable_names=frozenset({"f"}))
    shape = shape_of(ask(tool_use=use), replace(PLAIN, tool_format=FORMATS["qwen3_coder"]), "")
    assert await shape.grammar()
    parts = shape.parts()
    text = f"<tool_call>\n<function=f>\n<parameter=path>\n{written}\n</parameter>\n</function>\n</tool_call>"
    _, content, deltas = parts.feed(text)
    assert (content, parts.has_calls) == ("", True)
    assert json.loads(joined_calls(deltas)[0].arguments) == {"path": expected}


@pytest.mark.parametrize("name", FORMATS)
async def test_calls_that_are_required_come_valid_in_every_format(
    gateway: OpenGateway, serving: Serving, name: str
) -> None:
    opened = await gateway(model=replace(serving.model, tool_format=name))
    use = replace(USE, is_required=True, is_parallel=False, callable_names=frozenset({"f"}))
    params = {"ignore_eos": False, "logit_bias": no_spaces(serving)}
    text, calls = await answered(opened, ask(tool_use=use, max_tokens=160, params=params))
    assert text == ""
    assert [call.name for call in calls] == ["f"]
    assert json.loads(calls[0].arguments) in ANSWERS


@pytest.mark.parametrize("name", ["json", "llama3", "xlam"])
async def test_an_answer_is_content_or_calls_where_both_are_plain_json(
    gateway: OpenGateway, serving: Serving, name: str
) -> None:
    opened = await gateway(model=replace(serving.model, tool_format=name))
    use = replace(USE, is_parallel=False, callable_names=frozenset({"f"}))
    city = Grammar(source=LLMatcher.grammar_from_json_schema(SCHEMA), field="response_format")
    for seed in range(4):
        params = {"ignore_eos": False, "temperature": 1.0, "seed": seed, "logit_bias": no_spaces(serving)}
        text, calls = await answered(opened, ask(tool_use=use, grammar=city, max_tokens=160, params=params))
        assert bool(text) != bool(calls)
        assert json.loads(text or calls[0].arguments) in ANSWERS


async def test_calls_before_a_stop_string_end_alike_wherever_the_bound_lies(
    gateway: OpenGateway, serving: Serving
) -> None:
    """The token that completed the stop string was the last one permitted, and the client ran no tools."""
    opened = await gateway(model=replace(serving.model, tool_format="hermes"))
    use = ToolUse(tools=TOOLS, callable_names=frozenset({"f"}), is_required=True)
    ends, max_tokens = [], 160
    for _ in range(2):
        params = {"ignore_eos": False, "logit_bias": no_spaces(serving)}
        asked = ask(tool_use=use, stop=("</tool_call>",), max_tokens=max_tokens, params=params)
        end = (await events_of(opened, asked))[-1]
        assert isinstance(end, Finished)
        ends.append(replace(end, num_cached_tokens=0))
        max_tokens = end.num_completion_tokens
    assert max_tokens < 160
    assert ends[0].reason is EndReason.TOOL_CALLS
    assert ends[1] == ends[0]


HARMONY_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m['role'] }}<|message|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)


@pytest.fixture
async def harmony(tiny_model: ModelConfig, tmp_path: Path) -> AsyncIterator[Serving]:
    """A model whose answers are messages in channels, and whose files name none of the tokens that end them."""
    folder = str(write_chat_model(tmp_path / "harmony", marks=MARKS, template=HARMONY_TEMPLATE))
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        fields = json.loads((tmp_path / "harmony" / name).read_text())
        fields |= {"eos_token": "<|bos|>"} if "eos_token" in fields else {"eos_token_id": 0}
        (tmp_path / "harmony" / name).write_text(json.dumps(fields))
    vocab_size = json.loads((tmp_path / "harmony" / "config.json").read_text())["vocab_size"]
    engine = replace(tiny_model.engine, model_path=folder)
    model = replace(tiny_model, engine=engine, tokenizer_path=folder, vocab_size=vocab_size)
    served = Serving(model, ChannelConfig(transport="handle", secret=SECRET, host="127.0.0.1"))
    yield served
    await served.replicas.server.stop()


def against(serving: Serving, *texts: str) -> tuple[tuple[int, float], ...]:
    """Biases against tokens wherever another one may stand."""
    codec = TextCodec(serving.model.tokenizer_path)
    special_ids = codec.pieces.special_ids
    ids = [i for text in texts for i in ([special_ids[text]] if text in special_ids else codec.encode_text(text))]
    return tuple((token_id, -100.0) for token_id in ids)


@pytest.mark.parametrize("is_required", [True, False])
async def test_a_call_in_a_channel_comes_valid_and_a_grammar_holds_in_the_final_one(
    harmony: Serving, is_required: bool
) -> None:
    """Random weights, led past the thoughts into a call, or into the final channel."""
    opened = await harmony.gateway()
    use = replace(USE, is_required=is_required, callable_names=frozenset({"f"}))
    bias = against(harmony, "a", "<|message|>") if is_required else against(harmony, "a", "c", " ", "<|end|>")
    params = {"ignore_eos": False, "logit_bias": bias}
    text, calls = await answered(opened, ask(tool_use=use, grammar=CHOICE, max_tokens=160, params=params))
    if is_required:
        assert text == ""
        assert [call.name for call in calls] == ["f"]
        assert json.loads(calls[0].arguments) in ANSWERS
    else:
        assert (text, calls) in ((answer, ()) for answer in ("yes", "no"))


@pytest.mark.parametrize("mark", ["<|return|>", "<|call|>"])
async def test_the_marks_that_end_an_answer_end_it_and_thoughts_are_told_apart(harmony: Serving, mark: str) -> None:
    """Led by a grammar of its own the answer is one that a model of the format would give."""
    ids = TextCodec(harmony.model.tokenizer_path).pieces.special_ids
    lark = (
        f"start: <[{ids[CHANNEL]}]> A <[{ids[MESSAGE]}]> B <[{ids[END]}]> <[{ids[START]}]> C <[{ids[CHANNEL]}]> D "
        f'<[{ids[MESSAGE]}]> E <[{ids[mark]}]>\nA: "analysis"\nB: "Hm."\nC: "assistant"\nD: "final"\nE: "Yes."\n'
    )
    source = json.dumps({"grammars": [{"lark_grammar": lark}]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerShape, "grammar", _returning(source))
        # A stop string is not looked for in a header.
        asked = ask(max_tokens=160, stop=("assistant",), params={"ignore_eos": False})
        events = await events_of(await harmony.gateway(), asked)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    assert "".join(delta.reasoning for delta in deltas) == "Hm."
    assert "".join(delta.text for delta in deltas) == "Yes."
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is EndReason.STOP
    assert 0 < events[-1].num_reasoning_tokens < events[-1].num_completion_tokens


def _returning(source: str) -> Callable[[AnswerShape], Awaitable[str]]:
    async def grammar(shape: AnswerShape) -> str:
        return source

    return grammar


async def test_no_grammar_holds_an_answer_that_goes_on_with_a_message() -> None:
    ids = {mark: place for place, mark in enumerate(MARKS)}
    dialect = Dialect(is_harmony=True, special_ids=ids)
    turns = (ChatMessage(role="user", content="?"), ChatMessage(role="assistant", content="So"))
    prompt = ChatPrompt(messages=turns, continues_final_message=True)
    assert shape_of(ask(prompt), dialect, "").stop_ids == ()
    assert shape_of(ask(prompt), dialect, "").shown == {ids[mark]: SIGN_BY_MARK[mark] for mark in MARKS}
    assert shape_of(ask(prompt), dialect, "").hidden == frozenset(ids.values())
    shape = shape_of(ask(prompt, params={"ignore_eos": False}), dialect, "")
    assert await shape.grammar() is None
    assert shape.parts().feed(" be it.") == ("", " be it.", ())
    assert shape.stop_ids == (ids["<|call|>"], ids["<|return|>"])
    with pytest.raises(RequestError) as refused:
        await shape_of(ask(prompt, grammar=CHOICE), dialect, "").grammar()
    assert refused.value.field == "structured_outputs"


def no_spaces(serving: Serving) -> tuple[tuple[int, float], ...]:
    """Biases against white space, which random weights would write wherever it may stand."""
    codec = TextCodec(serving.model.tokenizer_path)
    return tuple((token_id, -100.0) for space in (" ", "\n", "\t", "\r") for token_id in codec.encode_text(space))


async def answered(gateway: Gateway, request: GenerationRequest) -> tuple[str, tuple[ToolCall, ...]]:
    """Return the content and the calls of an answer, which have to be whole."""
    events = await events_of(gateway, request)
    deltas = [event for event in events if isinstance(event, TextDelta)]
    calls = joined_calls(piece for delta in deltas for piece in delta.calls)
    assert isinstance(events[-1], Finished)
    assert events[-1].reason is (EndReason.TOOL_CALLS if calls else EndReason.STOP)
    return "".join(delta.text for delta in deltas), calls


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


async def test_while_a_grammar_is_looked_at_the_event_loop_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    loop_goes_on = threading.Event()
    monkeypatch.setattr(grammars, "_reason_against", lambda source: "" if loop_goes_on.wait(20) else "it stood still")
    for asked in (ask(grammar=CHOICE), ask(tool_use=USE)):
        task = asyncio.ensure_future(shape_of(asked, PLAIN, "").grammar())
        asyncio.get_running_loop().call_later(0.01, loop_goes_on.set)
        await task
        loop_goes_on.clear()
