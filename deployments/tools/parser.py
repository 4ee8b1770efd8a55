"""Incremental parser that splits an answer's text into content and calls, however the text was split into pieces.

Total: anything but a call of a known tool is content. If the grammar of `deployments.tools.grammar` constrains the
answer, a call can only be truncated, never malformed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto
from itertools import product
from typing import Any

from deployments.answer_events import CallDelta
from deployments.stream.reasoning import MAX_SPACE, WHITE_SPACE, overlap, without_space
from deployments.tools.formats import ToolFormat
from deployments.tools.tagged import END, OPENING, TagScan, parameters_of

_SPACES = re.compile(f"[{WHITE_SPACE}]*")


class _State(Enum):
    CONTENT = auto()
    """No call yet."""
    HEAD = auto()
    """The head of a call must come next, preceded by the opening or separator."""
    ARGUMENTS = auto()
    AFTER = auto()
    """After the arguments of a call."""
    BETWEEN = auto()
    """After a call, before what closes the calls or another."""
    CLOSED = auto()
    """After all calls."""
    PLAIN = auto()
    """All remaining text is content."""


class CallParser:
    """The calls of one answer.

    Args:
        tools: parameter schemas of the callable tools by name.
        unenforced: names of the tools whose schemas the answer's grammar does not enforce.
        is_required: the answer consists of calls only.
        is_either: it is content or calls, not both, and a grammar holds the content, in which what opens calls is text.
        new_call_id: generates the id of each call.

    Attributes:
        num_read: how many characters were fed.
        content_start: how many of them come before the content returned last, which is one piece of the text.
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        tools: Mapping[str, Mapping[str, Any]],
        *,
        unenforced: frozenset[str] = frozenset(),
        is_required: bool = False,
        is_either: bool = False,
        new_call_id: Callable[[], str] | None = None,
    ) -> None:
        self._format = tool_format
        self._tools = tools
        self._unenforced = unenforced
        self._is_required = is_required
        self._new_call_id = new_call_id or tool_format.new_call_id
        # Then the first words tell.
        self._state = _State.HEAD if tool_format.is_alone or is_either else _State.CONTENT
        self._may_lack_opening = tool_format.may_lack_opening and not is_either
        self._before: tuple[str, ...] = tool_format.opening
        self._held = ""
        self.num_read = 0
        self.content_start = 0
        self._arguments: _ObjectScan | TagScan = _ObjectScan()
        self._num_started = 0
        self._num_complete = 0

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all of them complete."""
        return 0 < self._num_started == self._num_complete

    @property
    def num_held(self) -> int:
        """How many of the last characters are held back."""
        return len(self._held)

    def feed(self, text: str) -> tuple[str, tuple[CallDelta, ...]]:
        """Return content and call deltas that are final after this text: the content comes before the calls."""
        self.num_read += len(text)
        # A long value may be held. A string is lengthened without a copy only if a local name alone refers to it.
        held, self._held = self._held, ""
        held += text
        self._held = held
        content: list[str] = []
        calls: list[CallDelta] = []
        while self._step(content, calls):
            pass
        return "".join(content), tuple(calls)

    def close(self) -> str:
        """Return the content held back; a truncated call stays incomplete."""
        # After an opening the held text is a call with an incomplete head, not content.
        is_open = (
            self._state is _State.HEAD
            and not self._format.is_alone
            and self._held.lstrip(WHITE_SPACE).startswith(self._format.opening[0])
        )
        is_call = self._state is not _State.PLAIN and (self._is_required or self._num_started > 0 or is_open)
        self.content_start = self.num_read - len(self._held)
        content, self._held = ("" if is_call else self._held), ""
        return content

    def _step(self, content: list[str], calls: list[CallDelta]) -> bool:
        """Advance by one state if the held text allows it; return whether to go on."""
        match self._state:
            case _State.CONTENT:
                return self._leave_content(content)
            case _State.HEAD:
                return self._read_head(calls)
            case _State.ARGUMENTS:
                return self._read_arguments(calls)
            case _State.AFTER:
                return self._leave_call()
            case _State.BETWEEN:
                return self._leave_calls()
            case _State.CLOSED:
                return self._skip_space() and self._go_to(_State.PLAIN)
        # What comes after a call waits for a result of its own.
        if not calls:
            self._tell(len(self._held), content)
        return False

    def _leave_content(self, content: list[str]) -> bool:
        place, is_call = self._next_call()
        # White space before a call is not content.
        self._tell(without_space(self._held, place), content)
        return is_call and self._go_to(_State.HEAD)

    def _tell(self, num_chars: int, content: list[str]) -> None:
        if not content:
            self.content_start = self.num_read - len(self._held)
        content.append(self._held[:num_chars])
        self._held = self._held[num_chars:]

    def _next_call(self) -> tuple[int, bool]:
        """Return where the first call begins and True, or where one may begin once there is more text and False."""
        trigger = self._format.opening[0]
        opened = self._held.find(trigger)
        place = opened if opened >= 0 else len(self._held) - overlap(self._held, trigger)
        if self._may_lack_opening:
            start = self._format.before_name[0]
            for found in re.finditer(re.escape(start), self._held[:place]):
                end, _ = self._match_head((), found.start())
                if end != -1:
                    return found.start(), end is not None
            if opened < 0:
                place = min(place, len(self._held) - overlap(self._held, start))
        return place, opened >= 0

    def _read_head(self, calls: list[CallDelta]) -> bool:
        is_open = False
        befores = [self._before]
        if self._may_lack_opening:
            befores.append(())
        if self._format.silent and not self._num_started:
            # It is text where special tokens are shown.
            befores.append((self._format.silent, *self._before))
        for before in befores:
            end, tool = self._match_head(before)
            if end is None:
                is_open = True
            elif end >= 0:
                self._begin_call(tool, calls, is_enforced=before == self._before)
                self._held = self._held[end:]
                return True
        return not is_open and self._go_to(_State.PLAIN)

    def _match_head(self, before: tuple[str, ...], place: int = 0) -> tuple[int | None, str]:
        """Return where the head of a call that begins at `place` ends, as `_match` does, and the tool's name."""
        is_open = False
        # What follows a head proves that it is one; the brace shows that the arguments are an object.
        proofs = ("{",) if not self._format.is_tagged else ("",) if before else (OPENING, END)
        for lead in self._format.befores:
            # Once for all tools, of which there may be many.
            start = _match(self._held, (*before, *lead), place)
            is_open |= start is None
            for tool, proof in product(self._tools if start is not None and start >= 0 else (), proofs):
                end = _match(self._held, (*self._format.behind(tool), proof), start or 0)
                if end is not None and end >= 0:
                    return end - len(proof), tool
                is_open |= end is None
        return (None if is_open else -1), ""

    def _begin_call(self, tool: str, calls: list[CallDelta], *, is_enforced: bool) -> None:
        calls.append(CallDelta(index=self._num_started, call_id=self._new_call_id(), name=tool))
        self._num_started += 1
        self._arguments = _ObjectScan()
        if self._format.is_tagged:
            is_enforced = is_enforced and tool not in self._unenforced
            self._arguments = TagScan(parameters_of(self._tools[tool], is_enforced=is_enforced))
        self._state = _State.ARGUMENTS

    def _read_arguments(self, calls: list[CallDelta]) -> bool:
        length, arguments = self._arguments.feed(self._held)
        if arguments:
            calls.append(CallDelta(index=self._num_started - 1, arguments=arguments))
        self._held = self._held[length:]
        if self._arguments.is_complete:
            self._num_complete += 1
            return self._go_to(_State.AFTER)
        return self._arguments.is_broken and self._go_to(_State.PLAIN)

    def _leave_call(self) -> bool:
        after = self._format.after_arguments
        end = _match(self._held, after)
        if end == -1 and self._may_lack_opening:
            # What closes the opening is forgotten with it.
            end = _match(self._held, after[:-1])
        if end is None:
            return False
        if end < 0:
            return self._go_to(_State.PLAIN)
        self._held = self._held[end:]
        return self._go_to(_State.BETWEEN)

    def _leave_calls(self) -> bool:
        # White space after a call is not content, whether another call follows or nothing.
        if not self._skip_space():
            return False
        closed = _match(self._held, self._format.closing) if self._format.closing else -1
        if closed is None:
            return False
        if closed >= 0:
            self._held = self._held[closed:]
            return self._go_to(_State.CLOSED)
        self._before = self._format.between
        return self._go_to(_State.HEAD)

    def _skip_space(self) -> bool:
        """Drop white space; return whether there is other text behind it."""
        self._held = self._held.lstrip(WHITE_SPACE)
        return bool(self._held)

    def _go_to(self, state: _State) -> bool:
        self._state = state
        return True


class _ObjectScan:
    """Finds the end of a JSON object."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False
        self.is_complete = self.is_broken = False

    def feed(self, text: str) -> tuple[int, str]:
        """Return the number of characters of the text that belong to the object, and those characters."""
        for place, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_escaped = char == "\\"
                self._is_string = char != '"'
            elif char == '"':
                self._is_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_complete = True
                    return place + 1, text[: place + 1]
        return len(text), text


def _match(text: str, pieces: Sequence[str], place: int = 0) -> int | None:
    """Return where the pieces that begin at `place` end, None if more text is needed, -1 if they do not match.

    At most MAX_SPACE characters of white space may stand before each.
    """
    for piece in pieces:
        start, place = place, _spaces_end(text, place)
        if place - start > MAX_SPACE:
            return -1
        if not text.startswith(piece, place):
            return None if piece.startswith(text[place : place + len(piece)]) else -1
        place += len(piece)
    return place


def _spaces_end(text: str, place: int) -> int:
    found = _SPACES.match(text, place)
    return place if found is None else found.end()
