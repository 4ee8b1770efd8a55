"""Chat templates render as transformers renders them, and one that would not end is ended."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from jinja2 import TemplateError
from transformers.utils.chat_template_utils import render_jinja_template

from deployments.tokenizer.bounded_template import BoundedTemplate, TemplateBoundError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Wo ist «é» <b>? "},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": ["<", 1.5]}}}]},
    {"role": "tool", "name": "f", "content": "line\nline"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "x & y", "parameters": {"type": "object"}}}]
TEMPLATES = [
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] | trim }}\n{% endfor %}{{ bos_token }}",
    "{%- for m in messages %}\n  {%- if loop.first %}{{ loop.length }}{% endif %}\n{{ m.role + ': ' ~ m.content }}"
    "{% if loop.last %}{% break %}{% endif %}{% endfor %}",
    "{{ tools | tojson }}{{ tools | tojson(indent=2) }}{{ messages[-1] | items | list | length }}",
    "{% set ns = namespace(n=0) %}{% for m in messages | rejectattr('role', 'equalto', 'tool') %}"
    "{% set ns.n = ns.n + 1 %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}"
    "{% endfor %}{{ ns.n }}{{ messages | map(attribute='role') | join(', ') }}",
    "{% macro say(m) %}{{ m.content.split('\\n')[-1].strip() }}{{ caller() }}{% endmacro %}"
    "{% for m in messages %}{% call say(m) %}!{% endcall %}{% endfor %}",
    "{% generation %}{{ messages[1].content[1:-1] }}{% endgeneration %}{{ messages[1]['content'].replace('é', 'e') }}",
    "{{ 'yes' if add_generation_prompt is defined and 'x' in 'xyz' else 'no' }}{{ 7 % 3 }}{{ (2 * 3) ~ 'a' * 3 }}",
    "{{ messages[3].content | indent(4) }}{{ [1, 2] + [3] }}{{ undefined_one }}{{ messages[0].get('x', 'y') }}",
    "{{ '%s=%r, 100%%' | format(messages[0].content, messages[2].tool_calls) }}{{ '%(a)d' | format(a=3) }}",
    "{% filter upper %}{{ messages[0].content }}{% endfilter %}{{ strftime_now('%Y') }}",
    "{{ messages }}{{ tools ~ 1 }}{{ messages | string | upper }}{{ [3, 4] | sum }}{{ 12345678901234567890 * 10 }}",
    "{{ 'a\\n\\nb' | indent(2, true, blank=true) }}{{ 'a\\nb' | indent('>>') }}",
    "{{ tools | tojson(separators=(',', ':')) }}",
    "{{ messages | selectattr('role', 'in', ['user']) | map(attribute='content') | unique | sort | join(';') }}",
    "{% if messages[0].role == 'system' and messages | length > 1 %}{{ 7.25 | round(1) }}{{ [3, 1] | max }}{% endif %}",
    "{{ 1 is eq 1 }}{{ nothing is defined }}{{ messages[0].role is in ['system'] }}{{ nothing == 1 }}{{ 2 < 3 <= 3 }}",
]


NESTED = "{% set ns = namespace(x=['ab']) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
"""A small list of lists whose text has 2^60 items."""


TWINS = NESTED + "{% set ns.y = ['ab'] %}{% for i in range(60) %}{% set ns.y = [ns.y, ns.y] %}{% endfor %}"
"""Two such lists: to compare them takes as long."""


@pytest.mark.parametrize("source", TEMPLATES)
def test_a_template_renders_as_transformers_renders_it(source: str) -> None:
    options: dict[str, Any] = {"bos_token": "<s>", "add_generation_prompt": True}
    (expected,), _ = render_jinja_template([MESSAGES], chat_template=source, tools=TOOLS, **options)
    rendered = BoundedTemplate(source, max_chars=10_000).render({"messages": MESSAGES, "tools": TOOLS} | options)
    assert rendered == expected


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ i }}{% endfor %}",
        "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
        "{% macro f(n) %}{% if n %}{% set x = f(n - 1) %}{% set y = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10000000000 * ['a'] }}",
        "{{ 2 ** 999999999 }}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ 'a'.ljust(1000000000000) }}",
        "{{ '%1000000000s' % 'a' }}",
        "{{ '%1000000000s' | format('a') }}",
        "{{ '%-*d' | format(1000000000, 1) }}",
        "{{ '%(a).1000000000f' | format(a=1) }}",
        "{{ '%s%s' | format('a' * 9000, 'a' * 9000) }}",
        "{{ '{:>10000000000}'.format('a') }}",
        "{{ ('a' * 9000).replace('a', 'b' * 9000) }}",
        "{{ ('a' * 9000) | replace('a', 'b' * 9000) }}",
        "{{ (['a' * 9000] * 9000) | join }}",
        "{{ ('a' * 9000).join(['a'] * 9000) }}",
        "{{ 'a\\nb' | indent(1000000000) }}",
        "{{ ('\\n' * 9000) | indent(9000) }}",
        "{{ ('\\n' * 9000) | indent('x' * 9000) }}",
        "{{ ('a' * 9000).translate({97: 'b' * 9000}) }}",
        "{{ ('\\t' * 9000).expandtabs(9000) }}",
        "{{ ('a'.encode() * 10000000000) | length }}",
        "{{ (1).to_bytes(10000000000) | length }}",
        "{{ [1, 2] | tojson(indent=1000000000) }}",
        "{{ [[[1]]] | tojson(indent='x' * 9000) }}",
        "{{ range(99999) | list | tojson(separators=('x' * 9000, ':')) }}",
        "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
        NESTED + "{{ ns.x }}",
        NESTED + "{{ ns.x ~ 'a' }}",
        NESTED + "{{ ns.x | string }}",
        NESTED + "{{ ns.x | upper }}",
        NESTED + "{{ ns.x | tojson }}",
        NESTED + "{{ ns.x | join }}",
        NESTED + "{{ '%s' | format(ns.x) }}",
        NESTED + "{{ {'a': ns.x} | indent }}",
        "{{ ([('a', 'b')] * 9000) | sum(start=()) }}",
        "{{ 5 | round(-30000000) }}",
        "{{ 5 | round(30000000, 'floor') }}",
        TWINS + "{{ ns.x == ns.y }}",
        TWINS + "{{ ns.x < ns.y }}",
        TWINS + "{{ ns.x in [ns.y] }}",
        TWINS + "{{ ns.x is eq(ns.y) }}",
        TWINS + "{{ [ns.x, ns.y] | sort | length }}",
        TWINS + "{{ [[ns.x, ns.y]] | map('first') | unique | list | length }}",
        TWINS + "{{ [{'a': ns.x}] | selectattr('a', 'equalto', ns.y) | list | length }}",
    ],
)
def test_a_template_that_does_not_end_is_ended(source: str) -> None:
    template = BoundedTemplate(source, max_chars=10_000, clock=ticking())
    with pytest.raises(TemplateBoundError):
        template.render({})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('no') }}",
        "{{ messages.x.y }}",
        "{{ 1 / 0 }}",
        "{{ messages + 'a' }}",
        "{{ 'a' | int('x', 'y', 'z') }}",
        "{{ lipsum(9999999999) }}",
        "{{ 'abcd' | truncate(2, end='efgh') }}",
    ],
)
def test_what_a_template_cannot_or_must_not_do_is_its_own_error(source: str) -> None:
    with pytest.raises(TemplateError):
        BoundedTemplate(source, max_chars=10_000).render({"messages": []})


@pytest.mark.parametrize(
    "source",
    ["{% for %}", "{{ 'a' | center(9) }}", "{{ [1] | batch(9999999999, 0) }}", "{{ [1] | slice(9999999999) }}"],
)
def test_a_text_that_is_no_template_or_pads_is_refused_when_it_is_read(source: str) -> None:
    with pytest.raises(TemplateError):
        BoundedTemplate(source, max_chars=10_000)


def ticking() -> Any:
    """A clock on which every look takes a millisecond: tests do not wait."""
    return itertools.count(0, 0.001).__next__


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "nested too deep"),
        ("{% if x %}" * 3000 + "{% endif %}" * 3000, "nested too deep"),
        ("{% for x in y %}" * 25 + "{% endfor %}" * 25, "too many statically nested blocks"),
        ("{% break %}", "'break' outside loop"),
    ],
)
def test_a_template_that_python_does_not_compile_is_refused_when_it_is_read(source: str, words: str) -> None:
    """It ended a check of the configuration in a traceback."""
    with pytest.raises(TemplateError, match=words):
        BoundedTemplate(source, max_chars=100)
