"""Renders a conversation to prompt text with the model's own chat template.

Decides what a template is given (turns, tools, options) and words its refusals in terms of the caller's request.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from deployments.generation import DOCUMENTS, ChatMessage, ChatPrompt, ToolSpec
from deployments.prompt_texts import depth_of, object_in
from deployments.stream.reasoning import reasoning_of_template
from deployments.tokenizer.bounded_template import BoundedTemplate
from deployments.tokenizer.template_habits import EFFORT, EFFORTS, NO_EFFORT, TemplateHabits, habits_of
from deployments.tools.sample import PROBES, CallSample, call_sample
from deployments.tools.turns import plain_turns
from engine.errors import CheckpointError, RequestError

Change = Callable[[str], str]
"""Maps one text of a prompt to another."""
MAX_ARGUMENTS_DEPTH = 64
MAX_TEMPLATE_BYTES = 1 << 20
"""Of a file of its own; published templates have up to some 20 KB."""
OPTIONS_FIELD = "chat_template_kwargs"
_END_MARK = "\ue000end\ue001"
_OURS = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", "namespace", "range"}
)
"""Template variables that clients cannot set."""


def read_template(path: str) -> str:
    """Return the text of a file with a chat template.

    Raises:
        OSError: the file cannot be read.
        CheckpointError: it is not UTF-8, too long, or not a valid template.
    """
    with open(path, "rb") as file:
        content = file.read(MAX_TEMPLATE_BYTES + 1)
    if len(content) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(f"{path} is longer than {MAX_TEMPLATE_BYTES} bytes")
    try:
        source = content.decode()
        BoundedTemplate(source, max_chars=MAX_TEMPLATE_BYTES)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8") from error
    except TemplateError as error:
        raise CheckpointError(f"{path} is not a valid template: {error}") from error
    return source


class ChatTemplate:
    """The templates of one checkpoint: the default one and possibly one for chats with tools.

    Args:
        sources: template source by name ("default", "tool_use").
        special_tokens: template variables such as `bos_token`, by name.

    Raises:
        CheckpointError: a template cannot be compiled.
    """

    def __init__(self, sources: Mapping[str, str], special_tokens: Mapping[str, str], *, max_chars: int) -> None:
        self._special_tokens = dict(special_tokens)
        try:
            self._templates = {
                name: BoundedTemplate(source, max_chars=max_chars)
                for name, source in sources.items()
                if name in ("default", "tool_use")
            }
        except TemplateError as error:
            raise CheckpointError(f"the chat template cannot be compiled: {error}") from error
        self._habits = {template: habits_of(template, self._special_tokens) for template in self._templates.values()}

    def render(self, turns: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], prompt: ChatPrompt) -> str:
        """Return the prompt's text.

        Args:
            turns, tools: the prompt's, as `turn_fields` and `tool_fields` return them.

        Raises:
            RequestError: the template refuses them, lacks an option of the prompt, or exceeds its bounds.
        """
        template = self._template_for(tools)
        options = self._options(template, prompt)
        if "tools" not in template.variables:
            turns, tools = plain_turns(turns, tools, has_system=self._habits[template].shows_system), ()
        options["add_generation_prompt"] = prompt.begins_answer and not prompt.continues_final_message
        try:
            rendered = self._rendered(template, turns, tools, options)
        except TemplateError as error:
            message = error.message or "no reason given"
            field = "tools" if tools and self._takes(template, turns, options) else "messages"
            raise RequestError(f"the model's chat template refuses the {field}: {message}", field=field) from error
        return self._cut(rendered, template, turns, tools, options) if prompt.continues_final_message else rendered

    def call_sample(self) -> CallSample:
        """Return how the template for chats with tools writes calls."""
        return call_sample(self._rendered_or_none) if "tools" in self._template_for(True).variables else CallSample()

    def _template_for(self, has_tools: object) -> BoundedTemplate:
        return self._templates["tool_use" if has_tools and "tool_use" in self._templates else "default"]

    def _rendered_or_none(self, prompt: ChatPrompt) -> str | None:
        try:
            return self.render(turn_fields(prompt.messages), tool_fields(prompt.tools), prompt)
        except RequestError:
            return None

    def _rendered(
        self, template: BoundedTemplate, turns: Sequence[Any], tools: Sequence[Any], options: dict[str, Any]
    ) -> str:
        variables = {"messages": self._habits[template].turns(turns), "tools": list(tools) or None}
        return template.render({DOCUMENTS: None} | self._special_tokens | options | variables)

    def _cut(
        self,
        rendered: str,
        template: BoundedTemplate,
        turns: Sequence[Any],
        tools: Sequence[Any],
        options: dict[str, Any],
    ) -> str:
        """Return the text up to the end of the last turn's content, which the answer continues."""
        marked = turns[-1] | {"content": turns[-1]["content"] + _END_MARK}
        try:
            before, mark, _ = self._rendered(template, [*turns[:-1], marked], tools, options).rpartition(_END_MARK)
        except TemplateError:
            mark = ""
        if not mark:
            raise RequestError(
                "the model's chat template does not render the last message, which therefore cannot be continued",
                field="continue_final_message",
            )
        # Without the mark after it, the template may strip trailing white space.
        return before if rendered.startswith(before) else before.rstrip()

    def _takes(self, template: BoundedTemplate, turns: Sequence[Any], options: dict[str, Any]) -> bool:
        """Whether the template accepts the turns with known-good tools, so that the tools are at fault."""
        try:
            self._rendered(template, turns, tool_fields(PROBES), options)
        except TemplateError:
            return False
        return True

    def _options(self, template: BoundedTemplate, prompt: ChatPrompt) -> dict[str, Any]:
        known = template.variables - _OURS - self._special_tokens.keys()
        for name in prompt.template_options:
            if name == DOCUMENTS and name not in known:
                raise RequestError("the model's chat template does not show documents", field=DOCUMENTS)
            if name not in known:
                names = ", ".join(sorted(known)) or "none"
                raise RequestError(
                    f"the model's chat template has no option {name[:64]!r}; it has: {names}",
                    field=OPTIONS_FIELD,
                )
        options = dict(prompt.template_options)
        effort, habits = prompt.reasoning_effort, self._habits[template]
        switch = habits.switch
        _check_effort(options.get(EFFORT), habits, f"{OPTIONS_FIELD}.{EFFORT}")
        # A template that has both looks at the effort only if reasoning is on.
        if EFFORT in known and EFFORT not in options and (told := _told_effort(prompt, habits)) is not None:
            options[EFFORT] = told
        if effort is not None and switch is not None:
            options.setdefault(switch, effort != NO_EFFORT)
        if (
            effort not in (None, NO_EFFORT)
            and not options.keys() & {EFFORT, switch}
            and not prompt.effort_is_hint
            and reasoning_of_template(template.source) is None
        ):
            raise RequestError(
                "the model's chat template does not support reasoning effort: 'reasoning_effort' must be 'none'",
                field=EFFORT,
            )
        return options


def _told_effort(prompt: ChatPrompt, habits: TemplateHabits) -> str | None:
    """Return the effort that a template with efforts is told, None for its default."""
    effort = prompt.reasoning_effort
    if effort is not None and prompt.effort_is_hint:
        return habits.nearest_effort(effort)
    _check_effort(effort, habits, EFFORT)
    return effort


def _check_effort(effort: object, habits: TemplateHabits, field: str) -> None:
    if isinstance(effort, str) and effort in habits.refused_efforts:
        known = ", ".join(f"'{name}'" for name in EFFORTS if name not in habits.refused_efforts)
        raise RequestError(
            f"the model's chat template has no reasoning effort '{effort}'; '{field}' must be one of: {known}",
            field=field,
        )


def turn_fields(messages: Sequence[ChatMessage], change: Change = str) -> list[dict[str, Any]]:
    """Return turns in the form that chat templates take. Call arguments become objects if they can be parsed.

    Args:
        change: applied to every text that a client wrote, but not to roles and the names of fields.
    """
    name_by_call = {call.call_id: call.name for message in messages for call in message.tool_calls}
    turns = []
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": change(message.content)}
        name = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = change(message.tool_call_id)
            name = name or name_by_call.get(message.tool_call_id)
        if name is not None:
            turn["name"] = change(name)
        if message.reasoning is not None:
            # Templates written for transformers use either name.
            turn["reasoning_content"] = turn["thinking"] = change(message.reasoning)
        if message.tool_calls:
            turn["tool_calls"] = [
                {
                    "id": change(call.call_id),
                    "type": "function",
                    "function": {
                        "name": change(call.name),
                        "arguments": changed(arguments_read(call.arguments), change),
                    },
                }
                for call in message.tool_calls
            ]
        turns.append(turn)
    return turns


def tool_fields(tools: Sequence[ToolSpec], change: Change = str) -> list[dict[str, Any]]:
    """Return tools in the form that chat templates take; `change` as in `turn_fields`."""
    return [
        {
            "type": "function",
            "function": {
                "name": change(tool.name),
                "description": change(tool.description),
                "parameters": changed(tool.parameters, change),
            },
        }
        for tool in tools
    ]


def changed(value: Any, change: Change) -> Any:
    """Return nested values with every text changed, including the keys of objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key): changed(inner, change) for key, inner in value.items()}
    return [changed(inner, change) for inner in value] if isinstance(value, list | tuple) else value


def arguments_read(text: str) -> Any:
    """Return the arguments of a call as a template gets them: an object, or the text if it is no JSON of one."""
    parsed = object_in(text or "{}")
    return text if parsed is None or depth_of(parsed) >= MAX_ARGUMENTS_DEPTH else parsed
