"""Convert the events of one answer to consecutive blocks: reasoning, text, calls.

Two wire formats consist of blocks that open, grow and close: OpenAI's Responses and Anthropic's Messages.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from app.translation.streaming import Answer
from deployments.answer_events import TextDelta, TokenScore
from deployments.stream.harmony import PARAGRAPH
from deployments.stream.reasoning import overlap

_EMPTY_LINE = PARAGRAPH.encode()
_MAX_UNTOLD_BYTES = 1024
"""More than any token holds: if a text is this far ahead of its tokens, they spell it in another way."""


class BlockKind(Enum):
    """Kind of content of a block."""

    THOUGHTS = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True, kw_only=True)
class Block:
    """A part of an answer.

    Attributes:
        index: position among the blocks of the answer.
        text: content so far; for a call, its arguments.
        call_id, name: set for calls.
        scores: log-probabilities of a text's tokens, if they are returned.
    """

    kind: BlockKind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    scores: list[TokenScore] = field(default_factory=list)

    def arguments(self) -> dict[str, Any] | None:
        """Return the arguments of a call, None if they are no JSON object, as those of a call that was cut."""
        try:
            # Not by orjson: beyond 64 bits it makes floats of integers.
            found = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A change of a block: it opens, grows by a piece, or closes."""

    block: Block
    opens: bool = False
    closes: bool = False
    piece: str = ""
    scores: tuple[TokenScore, ...] = ()


class BlockReader:
    """Collects the blocks of one answer. At most one is open."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._waiting_scores: tuple[TokenScore, ...] = ()
        self._untold = b""
        """The end of the open text, whose tokens have not come: they hold more, which is held back."""
        self.blocks: list[Block] = []

    def feed(self, delta: TextDelta) -> Iterator[Step]:
        """Yield the changes of blocks that a piece of the answer causes."""
        self._waiting_scores += delta.scores
        if delta.reasoning:
            self._take_scores(delta.reasoning.encode(), is_first=False, is_last=False)
            yield from self._grow(BlockKind.THOUGHTS, delta.reasoning)
        if delta.text:
            yield from self._grow(BlockKind.TEXT, delta.text, self._take_scores_of(delta.text, is_last=not delta.calls))
        elif self._untold and (late := self._take_scores_of("", is_last=False)):
            yield from self._grow(BlockKind.TEXT, "", late)
        for call in delta.calls:
            if call.call_id is not None:
                yield from self.close()
                yield self._opened(BlockKind.CALL, call_id=call.call_id, name=call.name or "")
            if call.arguments:
                yield from self._grow(BlockKind.CALL, call.arguments)

    def close(self) -> Iterator[Step]:
        """Yield the end of the open block, if there is one."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Step(block=block, closes=True)

    def _take_scores_of(self, piece: str, *, is_last: bool) -> tuple[TokenScore, ...]:
        """Return the waiting scores of the tokens of a text's next piece, and of those that are late."""
        begun = self._open if self._open is not None and self._open.kind is BlockKind.TEXT else None
        is_first = begun is None or not begun.scores
        untold, told = self._untold + piece.encode(), _bytes_of(self._waiting_scores)
        raw = untold if _num_told(untold, told) else piece.encode()
        scores = self._take_scores(raw, is_first=is_first, is_last=is_last) if raw else ()
        self._untold = _rest_of(raw, _bytes_of(scores)) if scores else untold[:_MAX_UNTOLD_BYTES]
        return scores

    def _take_scores(self, raw: bytes, *, is_first: bool, is_last: bool) -> tuple[TokenScore, ...]:
        """Return the waiting scores of a text's tokens; they and those before them wait no longer."""
        waiting = self._waiting_scores
        place = _place_of(raw, waiting, is_first=is_first, is_last=is_last)
        self._waiting_scores = waiting[place.stop :]
        return waiting[place]

    def _grow(self, kind: BlockKind, piece: str, scores: tuple[TokenScore, ...] = ()) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self.close()
            yield self._opened(kind)
        assert self._open is not None
        self._open.text += piece
        self._open.scores += scores
        yield Step(block=self._open, piece=piece, scores=scores)

    def _opened(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Step:
        if kind is not BlockKind.TEXT:
            self._untold = b""
        self._open = Block(kind=kind, index=len(self.blocks), call_id=call_id, name=name)
        self.blocks.append(self._open)
        return Step(block=self._open, opens=True)


def blocks_of(answer: Answer) -> list[Block]:
    """Return the blocks of a whole answer, the same as in its stream."""
    reader = BlockReader()
    for delta in answer.deltas:
        deque(reader.feed(delta), maxlen=0)
    return reader.blocks


def _place_of(raw: bytes, scores: Sequence[TokenScore], *, is_first: bool, is_last: bool) -> slice:
    """Return the slice of the text's tokens: before them are marks and white space, after them the tokens of calls.

    Args:
        is_first: the text begins a block; of any other text, which continues one, no token is left out.
        is_last: nothing stands behind the text.
    """
    start, end, told = 0, len(scores), _bytes_of(scores)
    if raw not in told:
        bare = raw.removeprefix(_EMPTY_LINE)
        if bare in told:
            # Between two messages there is an empty line, of which there is no token.
            raw, is_first = bare, True
        elif is_first or (bare != raw and not _num_told(raw, told)):
            # The rest of its last token is held back, and the token's score with it.
            start = _place_of_last(scores, _num_told(raw, told) or _num_told(bare, told))
            return slice(start, end) if start < end else slice(0, 0)
    if is_first:
        places = () if is_last else range(end)
        exact = next((place for place in places if scores[place].raw and _spells(raw, scores[place:])), None)
        start = 0 if exact is None else exact
        while exact is None and end - start > 1 and raw in _bytes_of(scores[start + 1 : end]):
            start += 1
    while end - start > 1 and raw in _bytes_of(scores[start : end - 1]):
        end -= 1
    return slice(start, end)


def _num_told(raw: bytes, told: bytes) -> int:
    """Return how many of the text's bytes the tokens tell: all, or as many of its first as they end with."""
    return len(raw) if raw in told else overlap(told, raw)


def _rest_of(raw: bytes, told: bytes) -> bytes:
    """Return the end of a text that its tokens so far do not tell; nothing if they spell it in another way."""
    for text in (raw, raw.removeprefix(_EMPTY_LINE)):
        if num_told := _num_told(text, told):
            return text[num_told:]
    # They may begin within a character, of which other tokens have told the first bytes.
    return raw.partition(told)[2] if told else b""


def _place_of_last(scores: Sequence[TokenScore], num_bytes: int) -> int:
    """Return where the tokens begin that hold the last bytes."""
    place = len(scores)
    while num_bytes > 0:
        place -= 1
        num_bytes -= len(scores[place].raw)
    return place


def _spells(raw: bytes, scores: Sequence[TokenScore]) -> bool:
    """Return whether the first of these tokens spell the text, and no more."""
    place = 0
    for score in scores:
        if not raw.startswith(score.raw, place):
            return False
        place += len(score.raw)
        if place == len(raw):
            return True
    return False


def _bytes_of(scores: Sequence[TokenScore]) -> bytes:
    return b"".join(score.raw for score in scores)
