from __future__ import annotations

import re

import pytest

from deployments.tools.formats import FORMATS, HERMES, JSON, LLAMA3, MISTRAL, MISTRAL_ARGS, format_of_template


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages }}", JSON),
        ("return a json object within <tool_call></tool_call> XML tags", HERMES),
        ("[TOOL_CALLS] [{", MISTRAL),
        ("[TOOL_CALLS]{{ name }}[ARGS]", MISTRAL_ARGS),
        ("Environment: ipython", LLAMA3),
        ("<tool_call><function={{ name }}>", None),
        ("{% for tool in tools %}<|action|>", None),
        ('{% for tool in tools %}{"name": "x", "arguments": {}}', JSON),
    ],
)
def test_the_template_shows_the_format(template: str, expected: object) -> None:
    assert format_of_template(template) is expected


@pytest.mark.parametrize("name", FORMATS)
def test_ids_of_calls_are_unlike_and_look_as_the_template_wants_them(name: str) -> None:
    ids = {FORMATS[name].new_call_id() for _ in range(100)}
    assert len(ids) == 100
    pattern = r"[A-Za-z0-9]{9}" if name.startswith("mistral") else r"call_[A-Za-z0-9]{24}"
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
