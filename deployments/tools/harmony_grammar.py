"""Writes the grammar that constrains an answer in the harmony format: content and calls, but not thoughts.

    start: message* (final | call)

A call names an existing function and its arguments match the schema. A grammar for the content applies only to the
final channel; no preamble may come before it, because that is content too. Marks are special tokens, which lexemes
never match.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from deployments.generation import ToolSpec, ToolUse
from deployments.stream.harmony import CHANNEL, CONSTRAIN, END, FUNCTIONS, MESSAGE, START
from deployments.tools.grammar import arguments_of, escaped, with_content

_ANY_TEXT = r"/(?s:.+)/"


def write_harmony(special_ids: Mapping[str, int], use: ToolUse | None, content: str | None) -> str:
    """Return the grammar.

    Args:
        special_ids: ids of the marks.
        use: None if there are no tools.
        content: the grammar of the final channel, None for any text.
    """
    channel, message, end, start, constrain = (
        f"<[{special_ids[mark]}]>" for mark in (CHANNEL, MESSAGE, END, START, CONSTRAIN)
    )
    tools = [] if use is None else [tool for tool in use.tools if tool.name in use.callable_names]
    ends = [] if use is not None and use.is_required else ["final"]
    ends += [f"call_{index}" for index in range(len(tools))]
    sides = "analysis" if content is not None and "final" in ends else "analysis|commentary"
    lines = [
        f"start: message* ({' | '.join(ends)})",
        f"message: {channel} SIDE {message} TEXT? {end} {start} ROLE",
        f"final: {channel} FINAL {message} {'TEXT?' if content is None else '@content'}",
        f"TEXT: {_ANY_TEXT}",
        f"SIDE: /{sides}/",
        r"ROLE: /assistant/",
        r"FINAL: /final/",
        r"CALLED: /commentary ?(json)?/",
        r"KIND: / ?json/",
        *_calls(tools, channel, f"({constrain} KIND)? {message}"),
    ]
    return with_content("\n".join(lines), content)


def _calls(tools: Sequence[ToolSpec], channel: str, behind: str) -> list[str]:
    """Return the rules of calls. The recipient comes inside the channel header, or before it as templates render it."""
    lines = []
    for index, tool in enumerate(tools):
        name = escaped(FUNCTIONS + tool.name)
        lines += [
            f"INSIDE_{index}: /commentary to={name} ?(json)?/",
            f"BEFORE_{index}: / to={name}/",
            f"arguments_{index}: {arguments_of(tool)}",
            f"call_{index}: ({channel} INSIDE_{index} | BEFORE_{index} {channel} CALLED) {behind} arguments_{index}",
        ]
    return lines
