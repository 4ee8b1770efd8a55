from __future__ import annotations

import pytest

from deployments.generation import ChatPrompt
from deployments.tokenizer.chat_template import ChatTemplate
from deployments.tools.sample import CallSample, call_sample

TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}CALLS<|end|>{% endfor %}{{ tools }}"
EACH = "{% for c in m.tool_calls or [] %}ONE{% endfor %}"
OBJECT = '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
TAGS = (
    "\n<call>\n<function={{ c.function.name }}>\n{% for name, value in c.function.arguments | items %}"
    "<parameter={{ name }}>\n{{ value }}\n</parameter>\n{% endfor %}</function>"
)
SINGLE = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one, please') }}{% endif %}"


def sample_of(calls: str) -> CallSample:
    source = TURNS.replace("CALLS", calls)
    return ChatTemplate({"default": source}, {}, max_chars=10_000).call_sample()


@pytest.mark.parametrize(
    ("calls", "text", "takes_several"),
    [
        (EACH.replace("ONE", f"\n<call>\n{OBJECT}"), '<call>{"name":"first_call","arguments":{"key":"value"}}', True),
        (SINGLE + EACH.replace("ONE", OBJECT), '{"name":"first_call","arguments":{"key":"value"}}', False),
        ("{% if m.tool_calls %}={{ m.tool_calls[0].function.name }}{% endif %}", "=first_call", False),
        (
            EACH.replace("ONE", '{"id": {{ c.id | tojson }}, "f": "{{ c.function.name }}"}[CALL_ID]{{ c.id }}'),
            '{"f":"first_call"}',
            True,
        ),
        (
            EACH.replace("ONE", '{"arguments": {{ c.function.arguments | tojson }}, "name": "{{ c.function.name }}"}'),
            '{"name":"first_call","arguments":{"key":"value"}}',
            True,
        ),
        (EACH.replace("ONE", TAGS), "<call><function=first_call><parameter=key>value</parameter></function>", True),
        ("", "", True),
        ("{% if m.tool_calls %}{{ raise_exception('no calls') }}{% endif %}", "", True),
    ],
)
def test_a_template_shows_how_it_writes_calls(calls: str, text: str, takes_several: bool) -> None:
    assert sample_of(calls) == CallSample(takes_tools=True, text=text, takes_several=takes_several)


def test_a_template_that_takes_no_tools_shows_nothing() -> None:
    template = ChatTemplate({"default": "{{ messages[-1].tool_calls }}"}, {}, max_chars=10_000)
    assert template.call_sample() == CallSample()


def test_the_template_for_chats_with_tools_is_asked() -> None:
    sources = {"default": "{{ messages }}", "tool_use": "{{ tools[0].function.name }}{{ messages[-1].tool_calls }}"}
    assert "'first_call'" in ChatTemplate(sources, {}, max_chars=10_000).call_sample().text


def test_a_template_that_refuses_everything_shows_nothing() -> None:
    def refuse(prompt: ChatPrompt) -> None:
        assert prompt.tools

    assert call_sample(refuse) == CallSample(takes_tools=True)
