"""Probes what a chat template accepts and renders, and adapts turns to it."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from jinja2 import TemplateError

from deployments.generation import ReasoningEffort
from deployments.tokenizer.bounded_template import BoundedTemplate

Turn = dict[str, Any]

_TEXT = "Hello."
_USER: Turn = {"role": "user", "content": _TEXT}
_SYSTEM: Turn = {"role": "system", "content": "You are asked."}
_TOOL = {"name": "f", "description": "A probe.", "parameters": {"type": "object", "properties": {}}}
_NO_ARGUMENTS: dict[str, Any] = {}
_THOUGHTS = {"thinking": _TEXT, "reasoning_content": _TEXT}
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
EFFORT, NO_EFFORT = "reasoning_effort", "none"
EFFORTS: tuple[str, ...] = get_args(ReasoningEffort)
_SPELLED_NONE = re.compile(rf"""(['"]){NO_EFFORT}\1""")


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateHabits:
    """The form in which one template accepts turns.

    Attributes:
        shows_system: it renders system turns.
        wants_parts: it renders contents only as lists of parts, as multimodal templates do.
        wants_short_ids: it rejects call ids other than nine letters and digits.
        wants_one_text: it rejects a turn with calls that has both thoughts and content.
        wants_json: it renders arguments of calls only as the JSON text that a model wrote, not as an object.
        switch: variable that turns reasoning on or off; None if it has none.
        refused_efforts: values of `reasoning_effort` that it rejects.
        knows_no_effort: it has the effort "none", rather than one that it would show to the model as any other word.
        wants_answer_to_result: it rejects a user turn behind the result of a call.
    """

    shows_system: bool
    wants_parts: bool
    wants_short_ids: bool
    wants_one_text: bool
    wants_json: bool
    switch: str | None
    refused_efforts: frozenset[str] = frozenset()
    knows_no_effort: bool = False
    wants_answer_to_result: bool = False

    def turns(self, turns: Sequence[Turn]) -> list[Turn]:
        """Return turns in the form that the template accepts."""
        if self.wants_answer_to_result:
            turns = _with_results_extended(turns)
        if self.wants_short_ids:
            turns = [_with_short_ids(turn) for turn in turns]
        if self.wants_one_text:
            turns = [_with_one_text(turn) for turn in turns]
        if self.wants_json:
            turns = [_with_json(turn) for turn in turns]
        return [_in_parts(turn) for turn in turns] if self.wants_parts else list(turns)

    def nearest_effort(self, hint: str) -> str | None:
        """Return the effort that comes nearest to one that is no more than a hint, or None for the default."""
        if hint == NO_EFFORT:
            return hint if self.knows_no_effort and hint not in self.refused_efforts else None
        wanted = EFFORTS.index(hint)
        known = [place for place, effort in enumerate(EFFORTS) if place and effort not in self.refused_efforts]
        # Of two that are as near, the greater.
        return EFFORTS[min(known, key=lambda place: (abs(place - wanted), -place))] if known else None


def habits_of(template: BoundedTemplate, special_tokens: Mapping[str, str]) -> TemplateHabits:
    """Return a template's habits, found by rendering probe turns."""

    def rendered(*turns: Turn, tools: Sequence[Any] = (), **options: object) -> str | None:
        variables = {"messages": list(turns), "tools": list(tools) or None, "documents": None}
        try:
            return template.render({**special_tokens, "add_generation_prompt": False, **variables, **options})
        except TemplateError:
            return None

    def shows(text: str, *turns: Turn, tools: Sequence[Any] = ()) -> bool:
        found = rendered(*turns, tools=tools)
        return found is not None and text in found

    def switch() -> str | None:
        if "enable_thinking" in template.variables:
            return "enable_thinking"
        # Others have a variable of this name for the thoughts of a turn.
        user = first[-1]
        on, off = (rendered(user, add_generation_prompt=True, thinking=is_on) for is_on in (True, False))
        return "thinking" if on != off else None

    def refused_efforts() -> frozenset[str]:
        if EFFORT not in template.variables or rendered(first[-1]) is None:
            return frozenset()
        return frozenset(effort for effort in EFFORTS if rendered(first[-1], reasoning_effort=effort) is None)

    def takes(call_id: str, arguments: object = _NO_ARGUMENTS, **fields: str) -> bool:
        return takes_turns(_USER, _calling(call_id, arguments, **fields))

    def takes_turns(*turns: Turn) -> bool:
        return shows("", *turns, tools=({"type": "function", "function": _TOOL},))

    wants_parts = not shows(_TEXT, _USER) and shows(_TEXT, _in_parts(_USER))
    first = (_in_parts(_SYSTEM), _in_parts(_USER)) if wants_parts else (_SYSTEM, _USER)
    habits = TemplateHabits(
        shows_system=shows(_SYSTEM["content"], *first),
        wants_parts=wants_parts,
        wants_short_ids=takes(_short("call_1")) and not takes("call_1"),
        wants_one_text=takes(_short("call_1"), **_THOUGHTS) and not takes(_short("call_1"), content=_TEXT, **_THOUGHTS),
        wants_json=takes(_short("call_1"), json.dumps(_NO_ARGUMENTS)) and not takes(_short("call_1")),
        switch=switch(),
        refused_efforts=refused_efforts(),
        knows_no_effort=EFFORT in template.variables and bool(_SPELLED_NONE.search(template.source)),
    )
    result: Turn = {"role": "tool", "content": _TEXT, "name": "f", "tool_call_id": "call_1"}
    answered = habits.turns([_USER, _calling("call_1"), result, _USER])
    return replace(habits, wants_answer_to_result=takes_turns(*answered[:-1]) and not takes_turns(*answered))


def _calling(call_id: str, arguments: object = _NO_ARGUMENTS, **fields: str) -> Turn:
    call = {"type": "function", "id": call_id, "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call], **fields}


def _with_results_extended(turns: Sequence[Turn]) -> list[Turn]:
    """Return turns in which what the user says behind a result is part of it."""
    extended: list[Turn] = []
    for turn in turns:
        if turn["role"] == "user" and extended and extended[-1]["role"] == "tool":
            extended[-1] = extended[-1] | {"content": f"{extended[-1]['content']}\n\n{turn['content']}"}
        else:
            extended.append(turn)
    return extended


def _in_parts(turn: Turn) -> Turn:
    return turn | {"content": [{"type": "text", "text": turn["content"]}]}


def _with_short_ids(turn: Turn) -> Turn:
    """Return a turn with short ids; a call and its result still share one."""
    if "tool_call_id" in turn:
        turn = turn | {"tool_call_id": _short(turn["tool_call_id"])}
    if "tool_calls" in turn:
        turn = turn | {"tool_calls": [call | {"id": _short(call["id"])} for call in turn["tool_calls"]]}
    return turn


def _with_one_text(turn: Turn) -> Turn:
    """Return a turn with calls whose content is appended to its thoughts, since clients send back both."""
    if not (turn.get("tool_calls") and turn["content"] and turn.get("thinking")):
        return turn
    text = f"{turn['thinking']}\n\n{turn['content']}"
    return turn | {"content": "", "thinking": text, "reasoning_content": text}


def _with_json(turn: Turn) -> Turn:
    if "tool_calls" not in turn:
        return turn
    return turn | {"tool_calls": [call | {"function": _json_call(call["function"])} for call in turn["tool_calls"]]}


def _json_call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**function, "arguments": arguments}


def _short(call_id: str) -> str:
    return call_id if _SHORT_ID.fullmatch(call_id) else hashlib.sha256(call_id.encode()).hexdigest()[:9]
