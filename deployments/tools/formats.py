"""What the calls of a model look like in its text. One description serves both the grammar and the parser.

    hermes       Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>
    llama3       {"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
    mistral      [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]
    mistral_args [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}
    json         {"name": "f", "arguments": {}}

Pure. A format is a sequence of literal pieces, between any two of which white space may stand.

**Sources:** the chat templates of NousResearch/Hermes-2-Pro and Qwen/Qwen2.5 (hermes), meta-llama/Llama-3.1 (llama3),
mistralai's tokenizers v3 and v11 (mistral, mistral_args).
"""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written: `opening (head arguments after_arguments) (between head ...)* closing`.

    Attributes:
        silent: a special token that may stand before everything, and is not shown.
        opening: before the first call; empty where an answer that has calls has nothing else.
        before_name, before_arguments: what stands in a call's head, around the name.
        quotes_name: the name is a JSON string.
        id_prefix, id_chars: what the ids of calls look like, as the model's template wants them back.
    """

    name: str
    silent: str = ""
    opening: tuple[str, ...] = ()
    before_name: tuple[str, ...] = ("{", '"name"', ":")
    quotes_name: bool = True
    before_arguments: tuple[str, ...] = (",", '"arguments"', ":")
    after_arguments: tuple[str, ...] = ("}",)
    between: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    id_prefix: str = "call_"
    id_chars: int = 24

    @property
    def pieces(self) -> frozenset[str]:
        """Every literal piece, the names left out."""
        return frozenset(
            self.opening + self.before_name + self.before_arguments + self.after_arguments + self.between + self.closing
        )

    def head(self, tool: str) -> tuple[str, ...]:
        """Return the pieces of a call to `tool` up to its arguments."""
        return (*self.before_name, json.dumps(tool) if self.quotes_name else tool, *self.before_arguments)

    def new_call_id(self) -> str:
        """Draw the id of a call."""
        return self.id_prefix + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_chars))


HERMES = ToolFormat(
    name="hermes", opening=("<tool_call>",), after_arguments=("}", "</tool_call>"), between=("<tool_call>",)
)
LLAMA3 = ToolFormat(name="llama3", silent="<|python_tag|>", before_arguments=(",", '"parameters"', ":"), between=(";",))
MISTRAL = ToolFormat(
    name="mistral", opening=("[TOOL_CALLS]", "["), between=(",",), closing=("]",), id_prefix="", id_chars=9
)
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    opening=("[TOOL_CALLS]",),
    before_name=(),
    quotes_name=False,
    before_arguments=("[ARGS]",),
    after_arguments=(),
    between=("[TOOL_CALLS]",),
    id_prefix="",
    id_chars=9,
)
JSON = ToolFormat(name="json")

FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, JSON)}

_FOREIGN = ("<function=", "<arg_key>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<|channel|>")
"""Of templates whose calls look like none of ours."""


def format_of_template(template: str) -> ToolFormat | None:
    """Return the format that a chat template teaches, None for one that we do not know.

    A template that says nothing of tools leaves the generic one, which `deployments.tools.turns` teaches by itself.
    """
    if any(mark in template for mark in _FOREIGN):
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<|python_tag|>" in template or "Environment: ipython" in template:
        return LLAMA3
    # One that tells of tools, and not in JSON's words, teaches something else.
    return None if "tools" in template and "arguments" not in template else JSON
