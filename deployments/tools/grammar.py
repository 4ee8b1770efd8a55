"""Writes the Lark grammar that constrains an answer with thoughts, content and tool calls.

    start: thinking? (content | content? calls)

A call is always complete and valid: an existing name and arguments that match its schema. Lexemes are regular
expressions and the lexer never backtracks, so the whole head of a call is one lexeme, and the text before a call ends
lazily with the opening. If calls and content are both plain JSON they begin with the same lexemes, a brace and a key,
so every piece of a call is then a lexeme of its own.

**Source:** the Lark dialect of llguidance 1.9 (docs/syntax.md): `[lazy]`, `%json`, `@grammar`, `<[token id]>`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from deployments.generation import ToolSpec, ToolUse
from deployments.stream.reasoning import ReasoningFormat
from deployments.tools import tagged
from deployments.tools.formats import ToolFormat

# Bounds white space, which a small model would otherwise emit forever.
JSON_STYLE: Any = {"whitespace_flexible": True, "whitespace_pattern": r"[ \n]{1,24}"}

_SPACE = r"[ \t\r\n]{0,8}"
_ANY_SPACE = r"[ \t\r\n]*"
"""In what free text must not match: those who read it look past more white space than a head or a mark may have."""
_ANYTHING = r"(?s:.*)"
_REGEX_SIGNS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules(ToolUse):
    """Which tools an answer may call, and the format in which its model writes calls."""

    tool_format: ToolFormat


def write_grammar(
    special_ids: Mapping[str, int],
    *,
    thinking: ReasoningFormat | None = None,
    has_begun: bool = False,
    calls: CallRules | None = None,
    content: str | None = None,
) -> str:
    """Return the grammar of an answer.

    Args:
        special_ids: ids of the model's special tokens by text. Lexemes never match special tokens.
        has_begun: the prompt already opened the thoughts.
        content: the grammar of the content, None for any text beside calls.
    """
    is_either = calls is not None and calls.tool_format.is_alone and content is not None
    rules = _Rules(special_ids, is_piecewise=is_either)
    # Space behind thoughts is not shown. Without thoughts it would be: where `yes` is a choice, ` yes` is none.
    space = " SPACE?" if calls is None else ""
    prefix = "" if thinking is None else _thinking(rules, thinking, has_begun, space)
    answer = _answer(rules, calls, content is not None)
    rules.add("TEXT", f"/{_ANYTHING}/{rules.excluded}")
    rules.add("SPACE", r"/[ \t\r\n]{1,16}/")
    rules.add("start", f"{prefix} ({answer})" if prefix else answer)
    return with_content(rules.text(), content)


def _answer(rules: _Rules, calls: CallRules | None, has_content: bool) -> str:
    if calls is None:
        return "@content"
    content = "SPACE? @content" if has_content else "TEXT?"
    tool_format = calls.tool_format
    opening = tool_format.opening
    if tool_format.is_alone:
        heads = "|".join(
            _joined((*opening, *head), _ANY_SPACE) for tool in calls.tools for head in tool_format.heads(tool.name)
        )
        # Spelled by other tokens, what may come before a call is text to the lexer, but not to who reads it.
        silent = f"({_ANY_SPACE}{escaped(tool_format.silent)})?" if tool_format.silent else ""
        rules.exclude(f"{silent}({heads}){_ANYTHING}")
    elif opening[0] not in rules.special_ids:
        rules.add("LEAD", f"/{_ANYTHING}{escaped(opening[0])}/{rules.excluded}")
        rules.exclude(_ANYTHING + escaped(opening[0]) + _ANYTHING)
    if not calls.callable_names:
        return content
    if tool_format.is_alone:
        called = _calls(rules, calls, opening)
        return called if calls.is_required else f"{content} | {called}"
    called = _calls(rules, calls, ())
    if calls.is_required:
        return f"{rules.sequence(opening)} {called}"
    if has_content:
        return f"{content} | {rules.sequence(opening)} {called}"
    trigger, rest = opening[0], rules.sequence(opening[1:])
    if trigger in rules.special_ids:
        return f"TEXT? | TEXT? {rules.sequence((trigger,))} {rest} {called}"
    rules.add("lead[lazy]", "LEAD")
    return f"TEXT? | lead {rest} {called}"


def _calls(rules: _Rules, calls: CallRules, opening: tuple[str, ...]) -> str:
    """Return an expression that matches the calls; `opening` is part of the first call's head."""
    tool_format = calls.tool_format
    tools = [tool for tool in calls.tools if tool.name in calls.callable_names]
    after = rules.sequence(tool_format.after_arguments)
    heads: dict[str, tuple[str, ...]] = {"first": opening, "call": ()} if opening else {"call": ()}
    for index, tool in enumerate(tools):
        body = _tagged_arguments(rules, index, tool) if tool_format.is_tagged else arguments_of(tool)
        rules.add(f"arguments_{index}", body)
        for name, lead in heads.items():
            head = " | ".join(rules.sequence((*lead, *head)) for head in tool_format.heads(tool.name))
            rules.add(f"{name}_{index}", f"({head}) arguments_{index} {after}")
    for name in heads:
        rules.add(name, " | ".join(f"{name}_{index}" for index in range(len(tools))))
    more = f"({rules.sequence(tool_format.between)} call)*" if calls.is_parallel else ""
    silent = f"<[{rules.special_ids[tool_format.silent]}]>? " if tool_format.silent in rules.special_ids else ""
    return f"{silent}{next(iter(heads))} {more} {rules.sequence(tool_format.closing)}"


def _thinking(rules: _Rules, thinking: ReasoningFormat, has_begun: bool, space: str) -> str:
    begin, end = thinking.begin, thinking.end
    if end in rules.special_ids:
        thoughts = f"TEXT? <[{rules.special_ids[end]}]>"
    else:
        rules.add("thoughts[lazy]", f"/{_ANYTHING}{escaped(end)}/")
        thoughts = "thoughts"
    thoughts += space
    if has_begun:
        return thoughts
    if begin not in rules.special_ids:
        rules.exclude(_ANY_SPACE + escaped(begin) + _ANYTHING)
    return f"({rules.sequence((begin,))} {thoughts})?"


def with_content(rules: str, content: str | None) -> str:
    """Return the grammar made of Lark rules, in which `@content` refers to the content's grammar."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": rules}]
    if content is not None:
        # A schema or a regex is JSON around one grammar; choices, tags and grammars are plain Lark.
        (inner,) = json.loads(content)["grammars"] if content.startswith("{") else ({"lark_grammar": content},)
        grammars.append(inner | {"name": "content"})
    return json.dumps({"grammars": grammars})


def arguments_of(tool: ToolSpec) -> str:
    """Return the body of the rule for a call's arguments."""
    return f"%json {json.dumps({**tool.parameters, 'x-guidance': JSON_STYLE})}"


def _tagged_arguments(rules: _Rules, index: int, tool: ToolSpec) -> str:
    """Return the rule body for tagged arguments: parameters in schema order, the required ones present."""
    rules.add("text_value[lazy]", f"/{_ANYTHING}{escaped(tagged.CLOSING)}/")
    parameters = tagged.parameters_of(tool.parameters)
    if parameters is None:
        rules.add("ANY_NAME", rf"/{_SPACE}{escaped(tagged.OPENING)}[^<>\n]+>/")
        return "(ANY_NAME text_value)*"
    body = []
    for place, parameter in enumerate(parameters):
        opening = f"{_SPACE}{escaped(tagged.OPENING + parameter.name + tagged.NAME_END)}"
        if parameter.choices is not None:
            each = "|".join(_choice(c if isinstance(c, str) else json.dumps(c)) for c in parameter.choices)
            choice = rules.lexeme(f"({each}){escaped(tagged.CLOSING)}")
            rule = f"{rules.lexeme(opening)} {choice}"
        elif parameter.is_text and "string" in parameter.types:
            rule = f"{rules.lexeme(opening)} text_value"
        else:
            name = f"value_{index}_{place}"
            rules.add(name, arguments_of(replace(tool, parameters=dict(parameter.schema))))
            rule = f"{rules.lexeme(opening + _SPACE)} {name} {rules.sequence((tagged.CLOSING,))}"
        body.append(rule if parameter.is_required else f"({rule})?")
    return " ".join(body)


def _choice(text: str) -> str:
    """Return a pattern of an enumerated value and the line breaks around it, which may be left out if it has none."""
    before, after = (r"\n" if has_own else r"\n?" for has_own in (text.startswith("\n"), text.endswith("\n")))
    return before + escaped(text) + after


class _Rules:
    """Rules and lexemes by name; equal lexemes are shared.

    Args:
        is_piecewise: each piece of a sequence is a lexeme, as in a JSON grammar, rather than the whole sequence.

    Attributes:
        special_ids: ids of special tokens by text.
        excluded: regex terms for what free text must not match, so that the lexer leaves it to another lexeme.
    """

    def __init__(self, special_ids: Mapping[str, int], *, is_piecewise: bool) -> None:
        self.special_ids = special_ids
        self._is_piecewise = is_piecewise
        self._rules: dict[str, str] = {}
        self._lexeme_by_pattern: dict[str, str] = {}
        self.excluded = ""

    def exclude(self, pattern: str) -> None:
        """Prevent free text as a whole from matching `pattern`."""
        self.excluded += f" & ~/{pattern}/"

    def add(self, name: str, body: str) -> None:
        """Define a rule, or a lexeme if the name is uppercase."""
        self._rules[name] = body

    def sequence(self, pieces: Sequence[str]) -> str:
        """Return an expression that matches the pieces with optional white space before, between and after them."""
        parts: list[str] = []
        for is_special, run in groupby(pieces, self.special_ids.__contains__):
            if is_special:
                parts += [f"<[{self.special_ids[piece]}]>" for piece in run]
            else:
                parts.append(self._run(list(run)))
        return " ".join(parts)

    def text(self) -> str:
        """Return the grammar's text."""
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def _run(self, pieces: Sequence[str]) -> str:
        if self._is_piecewise:
            return "SPACE? " + " ".join(f"{self.lexeme(escaped(piece))} SPACE?" for piece in pieces)
        return self.lexeme(_joined(pieces))

    def lexeme(self, pattern: str) -> str:
        """Return the name of the lexeme with this regular expression, defining it if needed."""
        name = self._lexeme_by_pattern.setdefault(pattern, f"PIECE_{len(self._lexeme_by_pattern)}")
        self.add(name, f"/{pattern}/")
        return name


def _joined(pieces: Sequence[str], space: str = _SPACE) -> str:
    return space + "".join(escaped(piece) + space for piece in pieces)


def escaped(text: str) -> str:
    """Return a lexeme pattern that matches only this text."""
    return _REGEX_SIGNS.sub(lambda found: "\\" + found[0], text)
