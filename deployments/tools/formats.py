"""The formats in which models write tool calls. The grammar and the parser share each description.

    hermes       Let me see. <tool_call>{"name": "f", "arguments": {}}</tool_call>
    llama3       {"name": "f", "parameters": {}}; {"name": "g", "parameters": {}}
    mistral      [TOOL_CALLS] [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]
    mistral_args [TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}
    nemotron     <TOOLCALL>[{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]</TOOLCALL>
    functionary  Let me see. <function=f>{}</function><function=g>{}</function>
    qwen3_coder  <tool_call><function=f><parameter=a>text</parameter></function></tool_call>
    xlam         [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}]
    json         {"name": "f", "arguments": {}}

Pure. A format is a sequence of literal pieces with optional white space between them.

**Sources:** the chat templates of NousResearch/Hermes-2-Pro and Qwen/Qwen2.5 (hermes), meta-llama/Llama-3.1 (llama3),
mistralai's tokenizers v3 and v11 (mistral, mistral_args), nvidia/Llama-3.1-Nemotron-Nano (nemotron),
meetkai/functionary v3.1 (functionary), Qwen/Qwen3-Coder and Qwen/Qwen3.5 (qwen3_coder), Salesforce/xLAM-2 (xlam).
"""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import dataclass

from deployments.tools import tagged
from deployments.tools.sample import ARGUMENTS, NAMES, CallSample

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How calls are written: `opening (head arguments after_arguments) (between head ...)* closing`.

    Attributes:
        silent: an optional special token before everything else, part of the text only where such tokens are shown.
        is_alone: an answer with calls contains nothing else; only its beginning distinguishes it from text.
        opening: precedes the first call; its first piece marks the start of calls, unless `is_alone`.
        may_lack_opening: models forget the opening now and then; the head of a known tool and a tag then mark a call.
        before_name, before_arguments: the pieces of a call's head around the name.
        or_before_name: what a model may write instead of `before_name`, if anything.
        quotes_name: the name is a JSON string.
        is_tagged: arguments are tags (`deployments.tools.tagged`), not a JSON object.
        id_prefix, id_chars: prefix and number of random characters of call ids, as the model's template accepts them.
    """

    name: str
    silent: str = ""
    is_alone: bool = False
    opening: tuple[str, ...] = ()
    may_lack_opening: bool = False
    before_name: tuple[str, ...] = ("{", '"name"', ":")
    or_before_name: tuple[str, ...] = ()
    quotes_name: bool = True
    before_arguments: tuple[str, ...] = (",", '"arguments"', ":")
    after_arguments: tuple[str, ...] = ("}",)
    between: tuple[str, ...] = ()
    closing: tuple[str, ...] = ()
    is_tagged: bool = False
    id_prefix: str = "call_"
    id_chars: int = 24

    @property
    def pieces(self) -> frozenset[str]:
        """Every literal piece except the names."""
        heads = self.before_name + self.or_before_name + self.before_arguments
        return frozenset(self.opening + heads + self.after_arguments + self.between + self.closing)

    @property
    def befores(self) -> tuple[tuple[str, ...], ...]:
        """What may stand before the name in a call's head."""
        return (self.before_name, self.or_before_name) if self.or_before_name else (self.before_name,)

    def behind(self, tool: str) -> tuple[str, ...]:
        """Return the pieces of the head of a call to `tool` from its name on."""
        return (json.dumps(tool) if self.quotes_name else tool, *self.before_arguments)

    def heads(self, tool: str) -> tuple[tuple[str, ...], ...]:
        """Return the pieces of a call to `tool` up to its arguments, then those that may stand for them."""
        return tuple((*before, *self.behind(tool)) for before in self.befores)

    def beginnings(self, tool: str) -> list[str]:
        """Return how an answer that calls `tool` may begin, up to the opening brace of its arguments."""
        # The brace shows that the arguments are an object.
        begun = ["".join((*self.opening, *head, "{")) for head in self.heads(tool)]
        return begun + [self.silent + beginning for beginning in begun if self.silent]

    def begins(self, sample: CallSample) -> bool:
        """Whether a template's sample begins with a call in this format."""
        ((key, value),) = json.loads(ARGUMENTS).items()
        arguments = f"{tagged.OPENING}{key}{tagged.NAME_END}{value}{tagged.CLOSING}" if self.is_tagged else ARGUMENTS
        call = "".join([*self.opening, *self.heads(NAMES[0])[0], arguments])
        return sample.text.startswith("".join(call.split()))

    def new_call_id(self) -> str:
        """Generate a random call id."""
        return self.id_prefix + "".join(secrets.choice(_ALPHANUMERIC) for _ in range(self.id_chars))


HERMES = ToolFormat(
    name="hermes", opening=("<tool_call>",), after_arguments=("}", "</tool_call>"), between=("<tool_call>",)
)
LLAMA3 = ToolFormat(
    name="llama3",
    silent="<|python_tag|>",
    is_alone=True,
    # Not in the template, but the models copy it from the tools' definitions.
    or_before_name=("{", '"type"', ":", '"function"', ",", '"name"', ":"),
    before_arguments=(",", '"parameters"', ":"),
    between=(";",),
)
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
NEMOTRON = ToolFormat(name="nemotron", opening=("<TOOLCALL>", "["), between=(",",), closing=("]", "</TOOLCALL>"))
FUNCTIONARY = ToolFormat(
    name="functionary",
    opening=("<function=",),
    before_name=(),
    quotes_name=False,
    before_arguments=(">",),
    after_arguments=("</function>",),
    between=("<function=",),
)
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    opening=("<tool_call>",),
    may_lack_opening=True,
    before_name=("<function=",),
    quotes_name=False,
    before_arguments=(">",),
    after_arguments=(tagged.END, "</tool_call>"),
    between=("<tool_call>",),
    is_tagged=True,
)
XLAM = ToolFormat(name="xlam", is_alone=True, opening=("[",), between=(",",), closing=("]",))
JSON = ToolFormat(name="json", is_alone=True)

FORMATS = {
    tool_format.name: tool_format
    for tool_format in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, NEMOTRON, FUNCTIONARY, QWEN3_CODER, XLAM, JSON)
}

_FOREIGN = ("<function=", "<arg_key>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<|channel|>")
"""Marks in templates whose call format is not supported."""


def format_of_template(template: str, sample: CallSample) -> ToolFormat | None:
    """Return the call format of a chat template, or None if it is unknown.

    A template without tool support gets the generic JSON format, which `deployments.tools.turns` explains to the model.
    """
    if not sample.takes_tools:
        return JSON
    if sample.text:
        return next((tool_format for tool_format in FORMATS.values() if tool_format.begins(sample)), None)
    # The template renders no earlier calls: only its own text can reveal the format.
    if "<tool_call>" in template and "<function=" in template and tagged.OPENING in template:
        return QWEN3_CODER
    if any(mark in template for mark in _FOREIGN):
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    return LLAMA3 if "<|python_tag|>" in template or "Environment: ipython" in template else None
