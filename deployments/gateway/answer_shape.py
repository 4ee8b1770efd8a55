"""What one answer is held to, and how its text is taken apart into thoughts, content and calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from deployments.gateway.dialect import Dialect
from deployments.gateway.grammars import admitted, check_grammar, followable, unfollowable
from deployments.generation import CallDelta, ChatPrompt, GenerationRequest, Grammar, ToolUse
from deployments.stream.harmony import CALL, RETURN, HarmonyCounter, HarmonyParts
from deployments.stream.reasoning import ReasoningCounter, ReasoningFormat, ReasoningSplit
from deployments.tools.formats import ToolFormat
from deployments.tools.grammar import AnswerGrammar, CallRules
from deployments.tools.harmony_grammar import write_harmony
from deployments.tools.parser import CallParser
from engine.errors import GrammarError, RequestError


class AnswerParts:
    """The stages that take one answer's text apart; without any the text is the content."""

    def __init__(self, split: ReasoningSplit | None = None, calls: CallParser | None = None) -> None:
        self._split = split
        self._calls = calls

    @property
    def has_calls(self) -> bool:
        """Whether the answer has calls, all of them complete."""
        return self._calls is not None and self._calls.has_calls

    def feed(self, text: str) -> tuple[str, str, tuple[CallDelta, ...]]:
        """Return the thoughts, the content and the pieces of calls that this text has made certain."""
        thoughts, content = ("", text) if self._split is None else self._split.feed(text)
        return thoughts, *self._parsed(content)

    def close(self) -> tuple[str, str, tuple[CallDelta, ...]]:
        """Return what was held back."""
        thoughts, held = ("", "") if self._split is None else self._split.close()
        content, calls = self._parsed(held)
        if self._calls is not None:
            content += self._calls.close()
        return thoughts, content, calls

    def _parsed(self, content: str) -> tuple[str, tuple[CallDelta, ...]]:
        return (content, ()) if self._calls is None else self._calls.feed(content)


class AnswerShape:
    """The shape of one answer. Of a prompt that is no chat it is plain text, and the grammar that was asked for.

    Args:
        prompt_tail: how the prompt ends, as text.
    """

    def __init__(self, request: GenerationRequest, dialect: Dialect, prompt_tail: str) -> None:
        is_chat = isinstance(request.prompt, ChatPrompt)
        self._content = request.grammar
        self._tool_use: ToolUse | None = request.tool_use
        self._dialect = dialect
        self._reasoning: ReasoningFormat | None = dialect.reasoning if is_chat else None
        self._has_begun = self._reasoning is not None and prompt_tail.rstrip().endswith(self._reasoning.begin)
        self._is_harmony = is_chat and dialect.is_harmony
        self._ignores_ends = request.params.ignore_eos
        if isinstance(request.prompt, ChatPrompt) and self._is_harmony:
            # A turn that is gone on with has its message open.
            self._has_begun = request.prompt.continues_final_message

    @property
    def shown(self) -> dict[int, str]:
        """Special tokens whose text the stages need, by id."""
        is_needed = self._is_harmony or self._reasoning is not None or self._tool_use is not None
        return self._dialect.shown if is_needed else {}

    @property
    def hidden(self) -> frozenset[int]:
        """Special tokens that the text does not show, by id."""
        shown: Collection[int] = () if self._is_harmony else self.shown.keys()
        return frozenset(self._dialect.special_ids.values()).difference(shown)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end the answer, whatever the checkpoint says of them."""
        ends = (CALL, RETURN) if self._is_harmony and not self._ignores_ends else ()
        return tuple(self._dialect.special_ids[mark] for mark in ends)

    def parts(self) -> AnswerParts | HarmonyParts:
        """Return the stages for the answer's text."""
        if self._is_harmony:
            names = () if self._tool_use is None else self._tool_use.callable_names
            return HarmonyParts(names, has_begun=self._has_begun)
        split = None if self._reasoning is None else ReasoningSplit(self._reasoning, has_begun=self._has_begun)
        use = self._tool_use
        if use is None or not use.callable_names:
            return AnswerParts(split)
        calls = CallParser(self._tool_format(), sorted(use.callable_names), is_required=use.is_required)
        return AnswerParts(split, calls)

    def counter(self) -> ReasoningCounter | HarmonyCounter | None:
        """Return what counts the tokens of the thoughts."""
        if self._is_harmony:
            return HarmonyCounter(has_begun=self._has_begun)
        return None if self._reasoning is None else ReasoningCounter(self._reasoning, has_begun=self._has_begun)

    async def grammar(self) -> str | None:
        """Return what the engine holds the answer to, None for any text.

        Raises:
            RequestError: what was asked for cannot be followed; names the field.
        """
        content = self._content
        if content is not None:
            await check_grammar(content)
        if self._is_harmony:
            return await self._harmony_grammar()
        calls = None if self._tool_use is None else await self._call_rules(self._tool_use)
        if calls is None and (content is None or self._reasoning is None):
            return None if content is None else content.source
        source = AnswerGrammar(self._dialect.special_ids).write(
            thinking=self._reasoning,
            has_begun=self._has_begun,
            calls=calls,
            content=None if content is None else content.source,
        )
        await check_grammar(Grammar(source=source, field=self._field()))
        return source

    async def _harmony_grammar(self) -> str | None:
        content, use = self._content, self._tool_use
        if content is None and use is None:
            return None
        if self._has_begun:
            raise RequestError(
                f"'{self._field()}' cannot be followed in an answer that goes on with the last message.",
                field=self._field(),
            )
        use = None if use is None else replace(use, tools=await followable(use.tools))
        source = write_harmony(self._dialect.special_ids, use, None if content is None else content.source)
        await check_grammar(Grammar(source=source, field=self._field()))
        return source

    def refused(self, error: GrammarError) -> RequestError:
        """Return what the engine has against the grammar, told of the field that asked for it."""
        return unfollowable(self._field(), error.reason)

    def _field(self) -> str:
        return "tools" if self._content is None else self._content.field

    async def _call_rules(self, use: ToolUse) -> CallRules:
        tool_format = self._tool_format()
        if self._content is not None and not use.is_required and tool_format.is_alone:
            await self._check_distinct(self._content, use.callable_names, tool_format)
        return CallRules(
            tool_format=tool_format,
            tools=await followable(use.tools),
            callable_names=use.callable_names,
            is_required=use.is_required,
            # A turn that the template refuses would end the conversation.
            is_parallel=use.is_parallel and self._dialect.takes_several,
        )

    async def _check_distinct(self, content: Grammar, names: frozenset[str], tool_format: ToolFormat) -> None:
        """Refuse content that could not be told from a call, for only how they begin tells the two apart."""
        if await admitted(content, [tool_format.beginning(name) for name in sorted(names)]):
            raise RequestError(
                f"'{content.field}' allows what begins as a call of these tools does, which this model writes as plain "
                "JSON. Forbid additional properties, require others in front, or set 'tool_choice' to 'none' or "
                "'required'.",
                field=content.field,
            )

    def _tool_format(self) -> ToolFormat:
        if self._dialect.tool_format is None:
            raise RequestError(
                "This model's chat template has calls in a format that this server does not know; 'tool_format' in "
                "its configuration can name one.",
                field="tools",
            )
        return self._dialect.tool_format
