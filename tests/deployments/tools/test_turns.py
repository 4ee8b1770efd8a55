from __future__ import annotations

from typing import Any

from deployments.tools.turns import plain_turns

TOOL = {"type": "function", "function": {"name": "f", "description": "D", "parameters": {}}}


def call(name: str) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": name, "arguments": {"a": "é"}}}


def test_tools_calls_and_results_become_plain_turns() -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hm.", "tool_calls": [call("f"), call("g")]},
        {"role": "tool", "content": "1", "name": "f", "tool_call_id": "1"},
        {"role": "tool", "content": "2", "tool_call_id": "2"},
        {"role": "user", "content": "Quick!"},
        {"role": "assistant", "content": "Done."},
        {"role": "user", "content": "Thanks."},
    ]
    plain = plain_turns(turns, [TOOL])
    assert [turn["role"] for turn in plain] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert plain[0]["content"].startswith("Be brief.\n\nYou can call these functions:\n")
    assert '{"name": "f", "description": "D", "parameters": {}}' in plain[0]["content"]
    assert plain[2]["content"] == 'Hm.\n{"name": "f", "arguments": {"a": "é"}}\n{"name": "g", "arguments": {"a": "é"}}'
    assert plain[3]["content"] == "Result of f: 1\nResult of the function: 2\nQuick!"
    assert turns[0]["content"] == "Be brief."


def test_without_a_system_turn_one_is_made_and_without_tools_none() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    assert [turn["role"] for turn in plain_turns(turns, [TOOL])] == ["system", "user"]
    assert plain_turns(turns, []) == turns


def test_a_template_without_system_turns_teaches_in_the_first_turn_of_the_user() -> None:
    # A system turn that a client sends all the same is for the template to refuse.
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    system, user = plain_turns(turns, [TOOL], has_system=False)
    assert system == turns[0]
    assert user["role"] == "user"
    assert user["content"].startswith("Hi\n\nYou can call")
