"""What a chat template is told, and what it says where it cannot do what is asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.generation import ChatMessage, ChatPrompt, ToolCall, ToolSpec
from deployments.tokenizer.chat_template import (
    MAX_TEMPLATE_BYTES,
    ChatTemplate,
    read_template,
    tool_fields,
    turn_fields,
)
from engine.errors import CheckpointError, RequestError

TOLD = "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}{{ enable_thinking }}{{ colour }}"
TURNS = (
    ChatMessage(role="user", content="Hi"),
    ChatMessage(
        role="assistant",
        content="",
        reasoning="Hm.",
        tool_calls=(
            ToolCall(call_id="1", name="f", arguments='{"a": 1}'),
            ToolCall(call_id="2", name="g", arguments='{"a": '),
        ),
    ),
    ChatMessage(role="tool", content="5", tool_call_id="1"),
)
TOOLS = (ToolSpec(name="f", description="D", parameters={"type": "object"}),)


def render(source: str, prompt: ChatPrompt, **others: str) -> str:
    template = ChatTemplate({"default": source} | others, {"bos_token": "<s>"}, max_chars=10_000)
    return template.render(turn_fields(prompt.messages), tool_fields(prompt.tools), prompt)


def test_a_template_is_told_of_calls_results_and_tools() -> None:
    told = json.JSONDecoder().raw_decode(render(TOLD, ChatPrompt(messages=TURNS, tools=TOOLS)))[0]
    assert told[1]["tool_calls"] == [
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}},
        {"id": "2", "type": "function", "function": {"name": "g", "arguments": '{"a": '}},
    ]
    assert told[1]["reasoning_content"] == told[1]["thinking"] == "Hm."
    assert told[2] == {"role": "tool", "content": "5", "tool_call_id": "1", "name": "f"}
    assert '"parameters": {"type": "object"}' in render(TOLD, ChatPrompt(messages=TURNS, tools=TOOLS))


def test_an_effort_is_told_to_a_template_that_has_one_of_its_own() -> None:
    """As that of gpt-oss has it: in a macro, where nobody has set it."""
    source = (
        "{%- macro system() -%}{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'medium' %}"
        "{%- endif %}Reasoning: {{ reasoning_effort }}{%- endmacro -%}{{ system() }}{% for m in messages %}{% endfor %}"
    )
    assert render(source, ChatPrompt(messages=TURNS[:1])) == "Reasoning: medium"
    assert render(source, ChatPrompt(messages=TURNS[:1], reasoning_effort="high")) == "Reasoning: high"


def hinted(effort: str) -> ChatPrompt:
    return ChatPrompt(messages=TURNS[:1], reasoning_effort=effort, effort_is_hint=True)


def test_a_template_with_efforts_of_its_own_refuses_others_by_field_and_takes_a_hint_for_the_nearest() -> None:
    """Mistral's has two: coding agents send others, and every turn of theirs was refused, as if by its messages."""
    source = (
        "{% set reasoning_effort = reasoning_effort if reasoning_effort is defined else 'none' %}"
        "{% if reasoning_effort not in ['none', 'high'] %}{{ raise_exception('none or high') }}{% endif %}"
        "{{ reasoning_effort }}{% for m in messages %}{% endfor %}"
    )
    hints = ("none", "minimal", "medium", "max")
    assert [render(source, hinted(effort)) for effort in hints] == ["none", "high", "high", "high"]
    assert render(source.replace("'high'", "'low', 'high', 'max'"), hinted("medium")) == "high"
    for changes, field in (
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"template_options": {"reasoning_effort": "medium"}}, "chat_template_kwargs.reasoning_effort"),
    ):
        with pytest.raises(RequestError, match=rf"'{field}' must be one of: 'none', 'high'") as refused:
            render(source, ChatPrompt(messages=TURNS[:1], **changes))  # type: ignore[arg-type]
        assert refused.value.field == field


def test_a_hint_of_no_effort_is_not_shown_to_a_model_that_has_no_such_effort() -> None:
    """That gpt-oss was to reason at the effort "none", which is none of its three."""
    source = "{{ reasoning_effort or 'medium' }}{% for m in messages %}{% endfor %}"
    assert [render(source, hinted(effort)) for effort in ("none", "low")] == ["medium", "low"]


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
def test_an_effort_turns_reasoning_on_or_off_where_a_template_has_a_switch_beside_it(switch: str) -> None:
    """Without effort, GLM 5 reasoned at the highest; with one, DeepSeek V4 and Granite did not reason at all."""
    source = "{% for m in messages %}{% endfor %}{% if SWITCH %}{{ reasoning_effort }}<think>{% endif %}"
    both = source.replace("SWITCH", switch)
    alone = both.replace("{{ reasoning_effort }}", "")
    for effort, shown, is_on in ((None, "", False), ("none", "", False), ("high", "high", True)):
        prompt = ChatPrompt(messages=TURNS[:1], reasoning_effort=effort)
        assert render(both, prompt) == (f"{shown}<think>" if is_on else "")
        assert render(alone, prompt) == ("<think>" if is_on else "")
    told = ChatPrompt(messages=TURNS[:1], reasoning_effort="high", template_options={switch: False})
    assert render(both, told) == ""


def test_arguments_that_are_nested_without_end_stay_text() -> None:
    deep = '{"a": ' * 100 + "1" + "}" * 100
    call = ToolCall(call_id="1", name="f", arguments=deep)
    (turn,) = turn_fields([ChatMessage(role="assistant", content="", tool_calls=(call,))])
    assert turn["tool_calls"][0]["function"]["arguments"] == deep


@pytest.mark.parametrize(
    "content",
    [
        "{{ m.content }}",
        "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}",
        "{{ m.content if m.content is string else m.content[0].text }}",
    ],
)
def test_a_content_is_shown_by_a_template_that_knows_only_parts_too(content: str) -> None:
    """Templates of guards lost the text, and the guard found nothing in nothing."""
    source = f"{{% for m in messages %}}[{{{{ m.role }}}}]{content}{{% endfor %}}"
    messages = (TURNS[0], ChatMessage(role="assistant", content="So,"))
    assert render(source, ChatPrompt(messages=messages)) == "[user]Hi[assistant]So,"
    assert render(source, ChatPrompt(messages=messages, continues_final_message=True)) == "[user]Hi[assistant]So,"


def test_ids_of_another_server_are_shortened_for_a_template_that_wants_short_ones() -> None:
    source = (
        "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }}="
        "{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}{% endfor %}{% endfor %}{{ tools and '' }}"
    )
    call = ToolCall(call_id="call_0123456789", name="f", arguments="{}")
    turns = (
        TURNS[0],
        ChatMessage(role="assistant", content="", tool_calls=(call,)),
        ChatMessage(role="tool", content="5", tool_call_id=call.call_id),
    )
    shown, again = render(source, ChatPrompt(messages=turns, tools=TOOLS)).split("=")
    assert shown == again
    assert len(shown) == 9


def test_arguments_that_are_left_out_are_none() -> None:
    call = ToolCall(call_id="1", name="f", arguments="")
    (turn,) = turn_fields([ChatMessage(role="assistant", content="", tool_calls=(call,))])
    assert turn["tool_calls"][0]["function"]["arguments"] == {}


def test_a_chat_with_tools_takes_the_template_for_it() -> None:
    prompt = ChatPrompt(messages=TURNS[:1], tools=TOOLS)
    assert render("plain", prompt, tool_use="{{ tools[0].function.name }}") == "f"
    assert render("plain", ChatPrompt(messages=TURNS[:1]), tool_use="{{ tools }}") == "plain"


def test_a_template_that_knows_no_tools_gets_plain_turns() -> None:
    text = render("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", ChatPrompt(messages=TURNS))
    assert text.splitlines()[-1] == "user: Result of f: 5"


@pytest.mark.parametrize(
    ("source", "role"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}", "system"),
        ("{% for m in messages if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endfor %}", "user"),
        (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take"
            " turns') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}",
            "user",
        ),
    ],
)
def test_tools_are_taught_where_the_template_shows_it(source: str, role: str) -> None:
    text = render(source, ChatPrompt(messages=TURNS[:1], tools=TOOLS))
    assert text.startswith(f"[{role}]")
    assert '{"name": "f", "description": "D"' in text
    assert "Hi" in text


@pytest.mark.parametrize(("content", "field"), [("Hi", "tools"), ("no", "messages")])
def test_what_is_refused_because_of_the_tools_is_told_of_them(content: str, field: str) -> None:
    source = (
        "{% if messages[0].content == 'no' or tools[0].function.name == 'f' %}{{ raise_exception('odd') }}{% endif %}"
    )
    prompt = ChatPrompt(messages=(ChatMessage(role="user", content=content),), tools=TOOLS)
    with pytest.raises(RequestError, match=f"refuses the {field}: odd") as refused:
        render(source, prompt)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("options", "effort", "expected"),
    [
        ({}, None, ""),
        ({"enable_thinking": True}, None, "True"),
        ({}, "none", "False"),
        ({}, "high", "True"),
        ({"enable_thinking": False}, "high", "False"),
        ({"colour": "red"}, None, "red"),
    ],
)
def test_options_reach_the_template(options: dict[str, Any], effort: str | None, expected: str) -> None:
    prompt = ChatPrompt(messages=TURNS[:1], template_options=options, reasoning_effort=effort)
    assert render("{{ enable_thinking }}{{ colour }}", prompt) == expected


@pytest.mark.parametrize(
    ("options", "expected"), [({"documents": [{"title": "T", "text": "D"}]}, "False T: D."), ({}, "True")]
)
def test_documents_reach_a_template_that_shows_them(options: dict[str, Any], expected: str) -> None:
    source = "{{ documents is none }}{% for d in documents or [] %} {{ d.title }}: {{ d.text }}.{% endfor %}"
    assert render(source, ChatPrompt(messages=TURNS[:1], template_options=options)) == expected


def test_an_effort_reaches_a_template_that_knows_it() -> None:
    prompt = ChatPrompt(messages=TURNS[:1], reasoning_effort="low")
    assert render("{{ reasoning_effort }}", prompt) == "low"


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"template_options": {"color": 1}}, "chat_template_kwargs"),
        ({"template_options": {"messages": []}}, "chat_template_kwargs"),
        ({"template_options": {"bos_token": ""}}, "chat_template_kwargs"),
        ({"template_options": {"documents": [{"text": "D"}]}}, "documents"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"continues_final_message": True}, "continue_final_message"),
    ],
)
def test_what_the_template_cannot_do_is_refused_by_field(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as refused:
        render("{{ colour }}{{ bos_token }}", ChatPrompt(messages=TURNS[:1], **changes))
    assert refused.value.field == field


@pytest.mark.parametrize("begins", [True, False])
def test_a_prompt_begins_the_answer_or_ends_with_the_last_message(begins: bool) -> None:
    prompt = ChatPrompt(messages=TURNS[:1], begins_answer=begins)
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<a>{% endif %}"
    assert render(template, prompt) == TURNS[0].content + ("<a>" if begins else "")


def test_a_model_that_always_thinks_does_so_at_any_effort() -> None:
    prompt = ChatPrompt(messages=TURNS[:1], reasoning_effort="high")
    assert render("{{ messages[0].content.split('</think>')[-1] }}<think>", prompt) == "Hi<think>"


def test_a_template_that_knows_no_effort_goes_without_one_that_is_a_hint() -> None:
    assert render("a", ChatPrompt(messages=TURNS[:1], reasoning_effort="high", effort_is_hint=True)) == "a"


def test_an_effort_of_none_asks_nothing_of_a_template_without_a_choice() -> None:
    assert render("a", ChatPrompt(messages=TURNS[:1], reasoning_effort="none")) == "a"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}", "[user]Hi<end>[assistant] So, \n"),
        ("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}<end>{% endfor %}", "[user]Hi<end>[assistant]So,"),
    ],
)
def test_a_final_message_is_gone_on_with(source: str, expected: str) -> None:
    messages = (TURNS[0], ChatMessage(role="assistant", content=" So, \n"))
    assert render(source, ChatPrompt(messages=messages, continues_final_message=True)) == expected


@pytest.mark.parametrize("content", ["e", "end", "s", "user"])
def test_what_stands_behind_a_final_message_is_not_taken_for_it(content: str) -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content }}<end>{% endfor %}[user sees]"
    messages = (TURNS[0], ChatMessage(role="assistant", content=content))
    prompt = ChatPrompt(messages=messages, continues_final_message=True)
    assert render(source, prompt) == f"[user]Hi<end>[assistant]{content}"


def test_a_template_that_is_none_is_refused_at_the_start() -> None:
    with pytest.raises(CheckpointError, match="cannot be compiled"):
        ChatTemplate({"default": "{% for %}"}, {}, max_chars=10)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{% for m in messages %}", "is not a valid template"),
        (b"\xff", "is not UTF-8"),
        (b" " * (MAX_TEMPLATE_BYTES + 1), "is longer than"),
    ],
)
def test_a_file_that_is_no_template_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "chat.jinja"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"chat\.jinja {words}"):
        read_template(str(path))
