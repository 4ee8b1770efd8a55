"""The events of one answer -> its blocks, one after the other: thoughts, text, calls.

Two wire formats are made of blocks that open, grow and close: OpenAI's Responses and Anthropic's Messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from app.translation.streaming import Answer
from deployments.generation import TextDelta, TokenScore


class BlockKind(Enum):
    """What a block holds."""

    THOUGHTS = auto()
    TEXT = auto()
    CALL = auto()


@dataclass(slots=True, kw_only=True)
class Block:
    """A part of an answer.

    Attributes:
        index: its place among the blocks of the answer.
        text: what it holds so far; of a call the arguments.
        call_id, name: of a call.
        scores: of the tokens of a text, where they are told.
    """

    kind: BlockKind
    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    scores: list[TokenScore] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What happens to a block: it opens, it grows by a piece, or it closes."""

    block: Block
    opens: bool = False
    closes: bool = False
    piece: str = ""
    scores: tuple[TokenScore, ...] = ()


class BlockReader:
    """Reads the blocks of one answer. At most one is open."""

    def __init__(self) -> None:
        self._open: Block | None = None
        self._waiting_scores: tuple[TokenScore, ...] = ()
        self.blocks: list[Block] = []

    def feed(self, delta: TextDelta) -> Iterator[Step]:
        """Yield what a piece of the answer does to its blocks."""
        if delta.reasoning:
            yield from self._grow(BlockKind.THOUGHTS, delta.reasoning)
            # So far they were those of thoughts.
            self._waiting_scores = ()
        # Those of text that might have become a call come before it does.
        self._waiting_scores += delta.scores
        if delta.text:
            waiting, place = self._waiting_scores, _place_of(delta.text, self._waiting_scores)
            self._waiting_scores = waiting[place.stop :]
            yield from self._grow(BlockKind.TEXT, delta.text, waiting[place])
        for call in delta.calls:
            if call.call_id is not None:
                yield from self.close()
                yield self._opened(BlockKind.CALL, call_id=call.call_id, name=call.name or "")
            if call.arguments:
                yield from self._grow(BlockKind.CALL, call.arguments)

    def close(self) -> Iterator[Step]:
        """Yield the end of the block that is open, if there is one."""
        if self._open is not None:
            block, self._open = self._open, None
            yield Step(block=block, closes=True)

    def _grow(self, kind: BlockKind, piece: str, scores: tuple[TokenScore, ...] = ()) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self.close()
            yield self._opened(kind)
        assert self._open is not None
        self._open.text += piece
        self._open.scores += scores
        yield Step(block=self._open, piece=piece, scores=scores)

    def _opened(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Step:
        self._open = Block(kind=kind, index=len(self.blocks), call_id=call_id, name=name)
        self.blocks.append(self._open)
        return Step(block=self._open, opens=True)


def blocks_of(answer: Answer) -> list[Block]:
    """Return the blocks of a whole answer: those of its stream."""
    reader = BlockReader()
    for delta in answer.deltas:
        deque(reader.feed(delta), maxlen=0)
    return reader.blocks


def _place_of(text: str, scores: Sequence[TokenScore]) -> slice:
    """Return where the tokens of a text stand: before them are marks and white space, behind them what is held back."""
    raw, start, end = text.encode(), 0, len(scores)
    while end - start > 1 and raw in _bytes_of(scores[start + 1 : end]):
        start += 1
    while end - start > 1 and raw in _bytes_of(scores[start : end - 1]):
        end -= 1
    return slice(start, end)


def _bytes_of(scores: Sequence[TokenScore]) -> bytes:
    return b"".join(score.raw for score in scores)
