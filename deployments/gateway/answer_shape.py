"""The grammar that constrains one answer, and the parsing of its text into reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from deployments.answer_events import CallDelta
from deployments.gateway.dialect import Dialect
from deployments.gateway.grammars import (
    ANY_OBJECT,
    admitted,
    check_grammar,
    followable,
    unfollowable,
    without_hints,
)
from deployments.generation import ChatPrompt, GenerationRequest, Grammar, ToolSpec, ToolUse
from deployments.stream.harmony import CALL, RETURN, SIGN_BY_MARK, HarmonyCounter, HarmonyParts, HarmonyStops, Parts
from deployments.stream.reasoning import ReasoningCounter, ReasoningFormat, ReasoningSplit
from deployments.stream.stop_strings import StopStrings
from deployments.tools.formats import ToolFormat
from deployments.tools.grammar import CallRules, write_grammar
from deployments.tools.harmony_grammar import write_harmony
from deployments.tools.parser import CallParser
from deployments.tools.tagged import parameters_of
from engine.errors import GrammarError, RequestError

_CHECKERS = ThreadPoolExecutor(4, thread_name_prefix="check-grammar")
"""A check that has begun can not be stopped: whatever it takes, other work of the gateway has threads."""


class AnswerParts:
    """The stages that parse one answer's text; without any, all text is content.

    Attributes:
        content_range: place of the content returned last, in characters of the text.
    """

    def __init__(self, split: ReasoningSplit | None = None, calls: CallParser | None = None) -> None:
        self._split = split
        self._calls = calls
        self._num_read = 0
        self._thoughts_end: int | None = None if split is not None else -1
        self.content_range = range(0)

    @property
    def has_calls(self) -> bool:
        """Whether the answer has tool calls, all of them complete."""
        return self._calls is not None and self._calls.has_calls

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back."""
        return sum(stage.num_held for stage in (self._split, self._calls) if stage is not None)

    def is_shown(self, start: int, end: int) -> bool:
        """Return whether a token whose text spans [start, end) is of content or calls, not of the thoughts before."""
        return self._thoughts_end is not None and end > self._thoughts_end

    def pieces(self, text: str) -> tuple[str, ...]:
        """Return the text in pieces to feed one by one: what each yields comes in the order of `feed`'s result."""
        return (text,)

    def feed(self, text: str) -> Parts:
        """Return the reasoning, content and tool call deltas that are certain after this text."""
        self._num_read += len(text)
        thoughts, content = ("", text) if self._split is None else self._split.feed(text)
        return thoughts, *self._parsed(content)

    def close(self) -> Parts:
        """Return the output that was held back."""
        thoughts, held = ("", "") if self._split is None else self._split.close()
        content, calls = self._parsed(held)
        if self._calls is not None:
            rest = self._calls.close()
            start = self.content_range.start if content else self._content_start(self._calls)
            content += rest
            self.content_range = range(start, start + len(content))
        return thoughts, content, calls

    def _parsed(self, content: str) -> tuple[str, tuple[CallDelta, ...]]:
        if content and self._thoughts_end is None:
            self._thoughts_end = self._num_read - len(content)
        if self._calls is None:
            self.content_range = range(self._num_read - len(content), self._num_read)
            return content, ()
        content, calls = self._calls.feed(content)
        start = self._content_start(self._calls)
        self.content_range = range(start, start + len(content))
        return content, calls

    def _content_start(self, calls: CallParser) -> int:
        # What it reads is the end of the text: of that the thoughts come first.
        return calls.content_start + self._num_read - calls.num_read


def shape_of(request: GenerationRequest, dialect: Dialect, prompt_tail: str) -> AnswerShape:
    """Return the shape of one answer; `prompt_tail` is the text of the prompt's last tokens."""
    if dialect.is_harmony and isinstance(request.prompt, ChatPrompt):
        if request.shows_special:
            raise RequestError.about(
                "skip_special_tokens", "must be true: such tokens are the form of this model's answers."
            )
        return _HarmonyShape(request, dialect, request.prompt)
    return AnswerShape(request, dialect, prompt_tail)


class AnswerShape:
    """An answer with reasoning and tool calls between markers; without reasoning if the prompt is not a chat."""

    def __init__(self, request: GenerationRequest, dialect: Dialect, prompt_tail: str) -> None:
        self._content = request.grammar
        self._stop, self._keeps_stop = request.stop, request.keeps_stop
        self._shows_special = request.shows_special
        self._tool_use: ToolUse | None = request.tool_use
        self._unenforced: frozenset[str] = frozenset()
        self._dialect = dialect
        self._reasoning: ReasoningFormat | None = None
        self._has_begun = self._continues = False
        if dialect.reasoning is not None and isinstance(request.prompt, ChatPrompt):
            self._reasoning = dialect.reasoning
            ends_with_begin = prompt_tail.rstrip().endswith(dialect.reasoning.begin)
            self._continues = not ends_with_begin and _continues_thoughts(request.prompt, dialect.reasoning)
            self._has_begun = ends_with_begin or self._continues

    @property
    def shown(self) -> dict[int, str]:
        """Texts of the special tokens that the stages need to see, by id."""
        return {} if self._reasoning is None and self._tool_use is None else self._dialect.shown

    @property
    def hidden(self) -> frozenset[int]:
        """Ids of the special tokens that the text does not show."""
        return frozenset(() if self._shows_special else self._dialect.special_ids.values()).difference(self.shown)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Ids of tokens that end the answer, whatever the checkpoint's configuration says."""
        return ()

    def stops(self) -> StopStrings:
        """Return the stage that ends the answer's text at a stop string."""
        return StopStrings(self._stop, is_kept=self._keeps_stop)

    def parts(self) -> AnswerParts | HarmonyParts:
        """Return the stages for the answer's text; if `grammar` constrains it, they are to be made after that."""
        split = None
        if self._reasoning is not None:
            split = ReasoningSplit(self._reasoning, has_begun=self._has_begun, continues=self._continues)
        use = self._tool_use
        if use is None or not use.callable_names:
            return AnswerParts(split)
        # The grammar reads the same schemas, and both have to agree on which values are quoted.
        tools = {tool.name: without_hints(tool.parameters) for tool in use.tools if tool.name in use.callable_names}
        calls = CallParser(
            self._tool_format(),
            tools,
            unenforced=self._unenforced,
            is_required=use.is_required,
            is_either=self._content is not None,
        )
        return AnswerParts(split, calls)

    def counter(self) -> ReasoningCounter | HarmonyCounter | None:
        """Return a counter of reasoning tokens, or None for a model without reasoning."""
        return None if self._reasoning is None else ReasoningCounter(self._reasoning, has_begun=self._has_begun)

    async def grammar(self) -> str | None:
        """Return the grammar that the engine enforces on the answer, or None for any text.

        Raises:
            RequestError: the requested grammar cannot be followed; names the field.
        """
        if self._content is None and self._tool_use is None:
            return None
        return await asyncio.get_running_loop().run_in_executor(_CHECKERS, self._checked)

    def _checked(self) -> str | None:
        if self._content is not None:
            check_grammar(self._content)
        source = self._written(None if self._content is None else self._content.source)
        if source is not None:
            check_grammar(Grammar(source=source, field=self._field()))
        return source

    def _written(self, content: str | None) -> str | None:
        calls = None if self._tool_use is None else self._call_rules(self._tool_use)
        if calls is None and (content is None or self._reasoning is None):
            return content
        return write_grammar(
            self._dialect.special_ids, thinking=self._reasoning, has_begun=self._has_begun, calls=calls, content=content
        )

    def refused(self, error: GrammarError) -> RequestError:
        """Convert the engine's grammar error to one that names the request field."""
        return unfollowable(self._field(), error.reason)

    def _field(self) -> str:
        return "tools" if self._content is None else self._content.field

    def _call_rules(self, use: ToolUse) -> CallRules:
        tool_format = self._tool_format()
        if self._content is not None and not use.is_required and tool_format.is_alone:
            self._check_distinct(self._content, use.callable_names, tool_format)
        tools = followable(use.tools)
        self._unenforced = frozenset(tool.name for tool in tools if tool.parameters == ANY_OBJECT)
        if tool_format.is_tagged:
            _check_lists(tools)
        return CallRules(
            tool_format=tool_format,
            tools=tools,
            callable_names=use.callable_names,
            is_required=use.is_required,
            # If the template rejects a turn with several calls, the conversation could not go on after it.
            is_parallel=use.is_parallel and self._dialect.takes_several,
        )

    def _check_distinct(self, content: Grammar, names: frozenset[str], tool_format: ToolFormat) -> None:
        """Refuse content that could be mistaken for a tool call: the two are distinguished only by how they begin."""
        if admitted(content, tuple(text for name in sorted(names) for text in tool_format.beginnings(name))):
            raise RequestError.about(
                content.field,
                "permits output that begins like a tool call, which this model writes as plain JSON. Forbid "
                "additional properties, require other properties first, or set 'tool_choice' to 'none' or 'required'.",
            )

    def _tool_format(self) -> ToolFormat:
        if self._dialect.tool_format is None:
            raise RequestError(
                "This model's chat template writes tool calls in a format that this server does not know; the model's "
                "'tool_format' setting can name one.",
                field="tools",
            )
        return self._dialect.tool_format


def _continues_thoughts(prompt: ChatPrompt, reasoning: ReasoningFormat) -> bool:
    """Return whether the answer continues a message that begins with thoughts and does not end them."""
    if not prompt.continues_final_message:
        return False
    split = ReasoningSplit(reasoning, has_begun=False)
    split.feed(prompt.messages[-1].content)
    return split.has_thought and not split.is_over


def _check_lists(tools: Sequence[ToolSpec]) -> None:
    """Refuse strict tools whose schema is more than a list of parameters, which is all that tags can express.

    Raises:
        RequestError: names the first such tool.
    """
    for index, tool in enumerate(tools):
        if tool.is_strict and parameters_of(tool.parameters) is None:
            raise RequestError(
                f"The strict schema of '{tool.name}' may use only 'properties' and 'required': this model writes each "
                "argument separately, so that other keywords cannot be enforced.",
                field=f"tools[{index}].function.parameters",
            )


class _HarmonyShape(AnswerShape):
    """An answer in Harmony format, as messages in channels; the dialect's reasoning and tool formats do not apply."""

    def __init__(self, request: GenerationRequest, dialect: Dialect, prompt: ChatPrompt) -> None:
        super().__init__(request, dialect, "")
        # A continued final message is still open.
        self._has_begun = prompt.continues_final_message
        self._ignores_ends = request.params.ignore_eos

    @property
    def shown(self) -> dict[int, str]:
        return {self._dialect.special_ids[mark]: sign for mark, sign in SIGN_BY_MARK.items()}

    @property
    def hidden(self) -> frozenset[int]:
        return frozenset(self._dialect.special_ids.values())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return () if self._ignores_ends else tuple(self._dialect.special_ids[mark] for mark in (CALL, RETURN))

    def stops(self) -> HarmonyStops:
        return HarmonyStops(self._stop, is_kept=self._keeps_stop, has_tools=bool(self._callable_names))

    def parts(self) -> HarmonyParts:
        return HarmonyParts(self._callable_names, has_begun=self._has_begun)

    @property
    def _callable_names(self) -> frozenset[str]:
        return frozenset() if self._tool_use is None else self._tool_use.callable_names

    def counter(self) -> HarmonyCounter:
        return HarmonyCounter(has_begun=self._has_begun)

    def _written(self, content: str | None) -> str | None:
        use = self._tool_use
        if content is None and use is None:
            return None
        if self._has_begun:
            raise RequestError.about(self._field(), "cannot be enforced in an answer that continues the last message.")
        use = None if use is None else replace(use, tools=followable(use.tools))
        return write_harmony(self._dialect.special_ids, use, content)
