"""Tools for a chat template without tool support: functions are described in the system turn, and calls and their
results become plain turns. The model is told to write calls as JSON, and the grammar keeps them valid.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TEACHING = (
    "You can call these functions:\n{tools}\n"
    'To call one, answer with nothing but a JSON object: {{"name": <its name>, "arguments": <an object>}}. '
    "To call several, write one object after the other."
)

Turn = Mapping[str, Any]


def plain_turns(
    turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]], *, has_system: bool = True
) -> list[dict[str, Any]]:
    """Return turns without calls and tool results, and with the functions described in one of them.

    Args:
        turns, tools: in the form that chat templates take.
        has_system: the template renders system turns; else the first user turn describes the functions.
    """
    plain: list[dict[str, Any]] = []
    for turn in turns:
        is_result = turn["role"] == "tool"
        if is_result or (turn["role"] == "user" and plain and plain[-1].get("is_result")):
            name = turn.get("name", "the function")
            said = f"Result of {name}: {turn['content']}" if is_result else turn["content"]
            # Templates require user and assistant turns to alternate.
            if plain and plain[-1].get("is_result"):
                plain[-1]["content"] += f"\n{said}"
            else:
                plain.append({"role": "user", "content": said, "is_result": True})
        elif turn.get("tool_calls"):
            calls = [json.dumps(call["function"], ensure_ascii=False) for call in turn["tool_calls"]]
            content = "\n".join([turn["content"], *calls] if turn["content"] else calls)
            plain.append({"role": turn["role"], "content": content})
        else:
            plain.append(dict(turn))
    for turn in plain:
        turn.pop("is_result", None)
    if tools:
        _teach(plain, tools, role="system" if has_system else "user")
    return plain


def _teach(turns: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, role: str) -> None:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    teaching = _TEACHING.format(tools=listed)
    turn = next((turn for turn in (turns[:1] if role == "system" else turns) if turn["role"] == role), None)
    if turn is None:
        turns.insert(0, {"role": role, "content": teaching})
    else:
        turn["content"] += f"\n\n{teaching}"
