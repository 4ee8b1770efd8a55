from __future__ import annotations

import re

import pytest

from deployments.tools.formats import (
    FORMATS,
    HERMES,
    LLAMA3,
    MISTRAL,
    MISTRAL_ARGS,
    NEMOTRON,
    QWEN3_CODER,
    format_of_template,
)
from deployments.tools.sample import CallSample


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>{"name":"first_call","arguments":{"key":"value"}}</tool_call>', "hermes"),
        ('{"name":"first_call","parameters":{"key":"value"}}', "llama3"),
        ('[TOOL_CALLS][{"name":"first_call","arguments":{"key":"value"},"id":"aaaaaaaa1"}]', "mistral"),
        ('[TOOL_CALLS]first_call[ARGS]{"key":"value"}', "mistral_args"),
        ('<TOOLCALL>[{"name":"first_call","arguments":{"key":"value"}}]</TOOLCALL>', "nemotron"),
        ('<function=first_call>{"key":"value"}</function>', "functionary"),
        ('[{"name":"first_call","arguments":{"key":"value"}}]', "xlam"),
        ('{"name":"first_call","arguments":{"key":"value"}}', "json"),
        ("[first_call(key='value')]", None),
        ("<tool_call><function=first_call><parameter=key>value</parameter></function></tool_call>", "qwen3_coder"),
        ('<tool_calls>[{"name":"first_call","arguments":{"key":"value"}}]</tool_calls>', None),
    ],
)
def test_the_calls_that_a_template_shows_are_what_its_model_writes(text: str, name: str | None) -> None:
    # What else the template says does not matter.
    found = format_of_template("<tool_call> Environment: ipython", CallSample(takes_tools=True, text=text))
    assert (found and found.name) == name


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("return a json object within <tool_call></tool_call> XML tags", HERMES),
        ("[TOOL_CALLS] [{", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("Environment: ipython", LLAMA3),
        ("<|python_tag|>", LLAMA3),
        ("<tool_call><function={{ name }}><parameter={{ key }}>", QWEN3_CODER),
        ("<tool_call><function={{ name }}>", None),
        ("<function={{ name }}><parameter={{ key }}>", None),
        ("<tool_call> with <parameter=", HERMES),
        ("{% for tool in tools %}<|action|>", None),
    ],
)
def test_a_template_that_shows_no_calls_is_taken_at_its_word(template: str, expected: object) -> None:
    assert format_of_template(template, CallSample(takes_tools=True)) is expected


@pytest.mark.parametrize("template", ["{{ messages }}", "<｜tool▁calls▁begin｜>", "<tool_call>"])
def test_a_template_that_takes_no_tools_leaves_the_generic_format(template: str) -> None:
    """One that shows calls all the same was refused, or its model held to a form that nobody had taught it."""
    assert format_of_template(template, CallSample()) is FORMATS["json"]


def test_every_piece_of_a_format_may_be_a_token_of_its_own() -> None:
    key = {"{", '"name"', ":", ",", '"arguments"', "}"}
    assert NEMOTRON.pieces == {"<TOOLCALL>", "[", *key, "]", "</TOOLCALL>"}
    assert MISTRAL_ARGS.pieces == {"[TOOL_CALLS]", "[ARGS]"}
    assert LLAMA3.pieces == key - {'"arguments"'} | {'"parameters"', '"type"', '"function"', ";"}


@pytest.mark.parametrize("name", FORMATS)
def test_ids_of_calls_are_unlike_and_look_as_the_template_wants_them(name: str) -> None:
    ids = {FORMATS[name].new_call_id() for _ in range(100)}
    assert len(ids) == 100
    pattern = r"[A-Za-z0-9]{9}" if name.startswith("mistral") else r"call_[A-Za-z0-9]{24}"
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
