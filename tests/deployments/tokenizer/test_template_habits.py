from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.tokenizer.bounded_template import BoundedTemplate
from deployments.tokenizer.template_habits import TemplateHabits, habits_of

EACH = "{% for m in messages %}[{{ m.role }}]CONTENT{% for c in m.tool_calls or [] %}CALL{% endfor %}{% endfor %}"
PARTS = "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}"
USUAL = TemplateHabits(
    shows_system=True,
    wants_parts=False,
    wants_short_ids=False,
    wants_one_text=False,
    wants_json=False,
    switch=None,
)


def habits(content: str = "{{ m.content }}", call: str = "{{ c.function.name }}", before: str = "") -> TemplateHabits:
    source = before + EACH.replace("CONTENT", content).replace("CALL", call)
    return habits_of(BoundedTemplate(source, max_chars=1000), {"bos_token": "<s>"})


def test_most_templates_take_turns_as_they_are() -> None:
    assert habits() == habits(before="{{ bos_token + '' }}") == USUAL
    assert habits("{{ m.content if m.content is string else m.content[0].text }}") == USUAL
    turns = [{"role": "assistant", "content": "a", "tool_calls": [{"id": "call_1"}]}]
    assert USUAL.turns(turns) == turns


@pytest.mark.parametrize(
    "before",
    [
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}",
        "{% set messages = messages | rejectattr('role', 'equalto', 'system') | list %}",
    ],
)
def test_a_system_turn_may_be_refused_or_left_out(before: str) -> None:
    assert not habits(before=before).shows_system


def test_a_template_for_images_takes_texts_as_they_are() -> None:
    """Templates of models that see, as Gemma 3's, put a system turn before the first one, and take both forms."""
    system = (
        "{% if messages[0].role == 'system' %}{% set s = messages[0].content %}"
        "{{ s if s is string else s[0].text }}{% set messages = messages[1:] %}{% endif %}"
    )
    either = "{% if m.content is string %}{{ m.content }}{% elif m.content is iterable %}" + PARTS + "{% endif %}"
    assert habits(either, before=system) == USUAL


def test_a_content_may_be_shown_only_in_parts() -> None:
    found = habits(PARTS)
    assert (found.wants_parts, found.shows_system) == (True, True)
    assert found.turns([{"role": "user", "content": "a"}]) == [
        {"role": "user", "content": [{"type": "text", "text": "a"}]}
    ]


def test_ids_may_have_to_be_short() -> None:
    found = habits(call="{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}")
    assert found.wants_short_ids
    calls, result, other = found.turns(
        [
            {"role": "assistant", "content": "", "tool_calls": [{"id": "call_1"}, {"id": "aB3aB3aB3"}]},
            {"role": "tool", "content": "5", "tool_call_id": "call_1"},
            {"role": "tool", "content": "6", "tool_call_id": "call_2"},
        ]
    )
    first, second = (call["id"] for call in calls["tool_calls"])
    assert second == "aB3aB3aB3"
    assert result["tool_call_id"] == first != other["tool_call_id"]
    assert len(first) == 9


def test_arguments_may_have_to_be_text() -> None:
    """As those of Functionary and of DeepSeek are: a conversation with a call was refused."""
    found = habits(call="{{ '>>>' + c.function.arguments }}")
    assert found.wants_json
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": "ö"}, '{"a": ')]
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    first, turn = found.turns(turns)
    assert first == turns[0]
    assert [call["function"]["arguments"] for call in turn["tool_calls"]] == ['{"a": "ö"}', '{"a": ']


ALTERNATING = (
    "{% set ns = namespace(place=0) %}{% for m in messages if m.role != 'tool' and not m.tool_calls %}"
    "{% if (m.role == 'user') != (ns.place % 2 == 0) %}{{ raise_exception('alternate!') }}{% endif %}"
    "{% set ns.place = ns.place + 1 %}{% endfor %}{{ tools and '' }}"
)


@pytest.mark.parametrize("content", ["{{ m.content }}", PARTS])
def test_a_user_turn_behind_a_result_may_be_refused(content: str) -> None:
    """What agents add to the results of their tools was a 400 with Mistral's templates."""
    assert not habits(content).wants_answer_to_result
    found = habits(content, call="{{ '>>>' + c.function.arguments }}", before=ALTERNATING)
    assert found.wants_answer_to_result
    result, user = {"role": "tool", "content": "5"}, {"role": "user", "content": "Go on."}
    turns = [user, result, result, user, user, {"role": "assistant", "content": "Yes."}, user]
    extended = replace(found, wants_parts=False).turns(turns)
    assert [turn["role"] for turn in extended] == ["user", "tool", "tool", "assistant", "user"]
    assert extended[1] == result
    assert extended[2]["content"] == "5\n\nGo on.\n\nGo on."


def test_a_template_that_refuses_everything_has_no_wishes() -> None:
    refusing = habits(before="{{ raise_exception('never') }}")
    assert refusing == replace(USUAL, shows_system=False)


def test_thoughts_beside_content_may_be_refused_in_a_turn_with_calls() -> None:
    source = (
        "{% for m in messages %}{% if m.tool_calls and m.content and m.thinking %}{{ raise_exception('not both') }}"
        "{% endif %}{{ m.content }}{{ m.thinking }}{% endfor %}{{ tools and '' }}"
    )
    found = habits_of(BoundedTemplate(source, max_chars=1000), {})
    assert found.wants_one_text
    plain = {"role": "assistant", "content": "Yes.", "thinking": "So."}
    called = plain | {"tool_calls": [{"id": "1"}]}
    first, second, third = found.turns([plain, called, called | {"content": ""}])
    assert (first["content"], first["thinking"]) == ("Yes.", "So.")
    assert (second["content"], second["thinking"]) == ("", "So.\n\nYes.")
    assert (third["content"], third["thinking"]) == ("", "So.")


@pytest.mark.parametrize(
    ("end", "switch"),
    [
        ("{% if enable_thinking %}<think>{% endif %}", "enable_thinking"),
        ("{% if add_generation_prompt and thinking %}<think>{% endif %}", "thinking"),
        ("{% if messages[-1].thinking %}{% set thinking = messages[-1].thinking %}{{ thinking }}{% endif %}", None),
        ("{% if messages[-1].role == 'assistant' and thinking %}{{ thinking }}{% endif %}", None),
    ],
)
def test_reasoning_may_have_a_switch(end: str, switch: str | None) -> None:
    assert habits("{{ m.content }}", before=end).switch == switch
