"""Incremental parser for answers in the harmony format: splits their messages into thoughts, content and calls.

    <|channel|>analysis<|message|>Let me see.<|end|><|start|>assistant
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

The analysis channel is thoughts, a message to a function is a call, everything else is content. Marks are special
tokens: each appears in the parser's input as one character that decoded text cannot contain, so a model can write about
its own marks. Pure; the result does not depend on how the text was split into pieces.

**Source:** OpenAI's description of the harmony response format, and the chat template of openai/gpt-oss.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from deployments.answer_events import CallDelta
from deployments.prompt_texts import object_in
from deployments.stream.stop_strings import StopStrings
from deployments.tools.formats import JSON

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN)
FUNCTIONS = "functions."
"""Prefix of the recipient when it is a client's function."""
SIGN_BY_MARK = {mark: chr(0xD800 + place) for place, mark in enumerate(MARKS)}
"""Lone surrogates, which decoded UTF-8 never contains."""
_SIGNS = re.compile(f"([{''.join(SIGN_BY_MARK.values())}])")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_PARAGRAPH = "\n\n"
"""Separator between two messages of the same kind."""

Parts = tuple[str, str, tuple[CallDelta, ...]]
"""Thoughts, content and call deltas."""


class _Kind(Enum):
    HEADER = auto()
    """The header of a message, or nothing yet."""
    THOUGHTS = auto()
    CONTENT = auto()
    CALL = auto()


class HarmonyParts:
    """The counterpart of `deployments.gateway.answer_shape.AnswerParts` for a harmony answer.

    Args:
        tools: names of the callable functions; a message to any other function is not a call.
        has_begun: the prompt already opened a final message, so the answer begins with content.
        new_call_id: generates the id of each call.

    Attributes:
        content_range: place of the content returned last, in characters of the text.
    """

    def __init__(
        self,
        tools: Collection[str] = (),
        *,
        has_begun: bool = False,
        new_call_id: Callable[[], str] = JSON.new_call_id,
    ) -> None:
        self._tools = frozenset(tools)
        self._new_call_id = new_call_id
        self._kind = _Kind.CONTENT if has_begun else _Kind.HEADER
        self._header = ""
        self._has_marks = has_begun
        self._texts: dict[_Kind, list[str]] = {}
        self._said = {self._kind}
        self._needs_paragraph = False
        self._num_read = 0
        self.content_range = range(0)
        self._shown: list[range] = []
        self._calls: list[CallDelta] = []
        self._arguments: list[list[str]] = []

    @property
    def is_thinking(self) -> bool:
        """Whether the parser is inside a message of thoughts."""
        return self._kind is _Kind.THOUGHTS

    @property
    def is_in_header(self) -> bool:
        """Whether the parser is in a header, so the kind of the message is not known yet."""
        return self._kind is _Kind.HEADER

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        return bool(self._arguments) and None not in map(object_in, map("".join, self._arguments))

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back: those before the first mark may be content."""
        return 0 if self._has_marks or self._tools else len(self._header)

    def is_shown(self, start: int, end: int) -> bool:
        """Return whether a token whose text spans [start, end) is of content or arguments of calls."""
        place = bisect_left(self._shown, end, key=lambda shown: shown.start) - 1
        return place >= 0 and start < self._shown[place].stop

    def pieces(self, text: str) -> tuple[str, ...]:
        """Return the text in pieces to feed one by one: each is of one message, or a mark between two."""
        return tuple(filter(None, _SIGNS.split(text))) or ("",)

    def feed(self, text: str) -> Parts:
        """Return the thoughts, content and call deltas that this text adds."""
        for piece in _SIGNS.split(text):
            self._num_read += len(piece)
            if _SIGNS.fullmatch(piece):
                self._pass(piece)
            elif piece:
                self._take(piece)
        return self._taken()

    def close(self) -> Parts:
        """Return what was held back: the whole text as content if the model wrote no mark at all.

        With tools, such a text is the beginning of a call: their grammar permits no other.
        """
        if not self._has_marks and not self._tools:
            self._texts[_Kind.CONTENT] = [self._header]
            self.content_range = range(self._num_read)
            self._shown.append(self.content_range)
        return self._taken()

    def _pass(self, sign: str) -> None:
        """Process a mark."""
        self._has_marks = True
        if sign == SIGN_BY_MARK[MESSAGE]:
            if self._kind is _Kind.HEADER:
                self._open()
        elif self._kind is _Kind.HEADER:
            self._header += sign
        elif sign != SIGN_BY_MARK[CONSTRAIN]:
            self._kind, self._header = _Kind.HEADER, sign

    def _open(self) -> None:
        """Begin the message that the header announces."""
        header, self._header = self._header, ""
        recipient = _RECIPIENT.search(_SIGNS.sub(" ", header))
        name = recipient[1].removeprefix(FUNCTIONS) if recipient and recipient[1].startswith(FUNCTIONS) else None
        channel = header.rpartition(SIGN_BY_MARK[CHANNEL])[2].split()
        if name in self._tools:
            self._kind = _Kind.CALL
            self._calls.append(CallDelta(index=len(self._arguments), call_id=self._new_call_id(), name=name))
            self._arguments.append([])
            return
        self._kind = _Kind.THOUGHTS if channel[:1] == ["analysis"] else _Kind.CONTENT
        self._needs_paragraph = self._kind in self._said

    def _take(self, text: str) -> None:
        """Process text between two marks."""
        if self._kind in (_Kind.CONTENT, _Kind.CALL):
            self._show(len(text))
        if self._kind is _Kind.HEADER:
            self._header += text
        elif self._kind is _Kind.CALL:
            self._calls.append(CallDelta(index=len(self._arguments) - 1, arguments=text))
            self._arguments[-1].append(text)
        else:
            num_chars = len(text)
            if self._needs_paragraph:
                text = _PARAGRAPH + text
            self._needs_paragraph = False
            if self._kind is _Kind.CONTENT:
                self.content_range = range(self._num_read - num_chars, self._num_read)
            self._said.add(self._kind)
            self._texts.setdefault(self._kind, []).append(text)

    def _show(self, num_chars: int) -> None:
        """Note the place of the characters read last, one range for each message."""
        start = self._num_read - num_chars
        if self._shown and self._shown[-1].stop == start:
            start = self._shown.pop().start
        self._shown.append(range(start, self._num_read))

    def _taken(self) -> Parts:
        texts, self._texts = self._texts, {}
        calls, self._calls = tuple(self._calls), []
        return "".join(texts.get(_Kind.THOUGHTS, ())), "".join(texts.get(_Kind.CONTENT, ())), calls


class HarmonyStops(StopStrings):
    """Stop strings of a harmony answer: not looked for in headers, which the client does not see.

    Args:
        has_tools: text before the first mark belongs to a header; without tools and marks, it becomes content.
    """

    def __init__(self, stops: Sequence[str], *, is_kept: bool = False, has_tools: bool = False) -> None:
        super().__init__(stops, is_kept=is_kept)
        self._is_in_header = has_tools

    def feed(self, text: str) -> tuple[str, str | None]:
        """As in `StopStrings`; headers and marks pass."""
        safe = ""
        for piece in _SIGNS.split(text):
            if self._is_in_header and not _SIGNS.fullmatch(piece):
                # Nothing is held back before it: no stop string contains the mark that begins a header.
                safe += piece
                continue
            found, stop = super().feed(piece)
            safe += found
            if stop is not None:
                return safe, stop
            if _SIGNS.fullmatch(piece):
                begins = self._is_in_header or piece != SIGN_BY_MARK[CONSTRAIN]
                self._is_in_header = begins and piece != SIGN_BY_MARK[MESSAGE]
        return safe, None


class HarmonyCounter:
    """Counts the tokens of the thoughts, including their headers and marks."""

    def __init__(self, *, has_begun: bool = False) -> None:
        self._parts = HarmonyParts(has_begun=has_begun)
        self._num_pending = 0
        self.num_tokens = 0

    def feed(self, text: str) -> None:
        """Count one token, given the text that became final with it."""
        self._parts.feed(text)
        self._num_pending += 1
        if self._parts.is_in_header:
            return
        if self._parts.is_thinking:
            self.num_tokens += self._num_pending
        self._num_pending = 0


def without_signs(text: str) -> str:
    """Return the text with each mark's sign replaced by a space, so that it is valid Unicode."""
    return _SIGNS.sub(" ", text)
