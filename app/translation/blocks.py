"""Convert the events of one answer to consecutive blocks: reasoning, text, calls.

Two wire formats consist of blocks that open, grow and close: OpenAI's Responses and Anthropic's Messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from app.translation.streaming import Answer
from deployments.answer_events import TextDelta, TokenScore
from deployments.prompt_texts import object_in


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
        pieces: of the content; for a call, of its arguments.
        call_id, name: set for calls.
        scores: log-probabilities of a text's tokens, if they are returned.
    """

    kind: BlockKind
    index: int
    pieces: list[str] = field(default_factory=list)
    call_id: str = ""
    name: str = ""
    scores: list[TokenScore] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content so far. Joined when it is read: a long one would be copied with each token."""
        return "".join(self.pieces)

    def arguments(self) -> dict[str, Any] | None:
        """Return the arguments of a call, None if they are no JSON object, as those of a call that was cut."""
        return object_in(self.text)


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
        self.blocks: list[Block] = []

    def feed(self, delta: TextDelta) -> Iterator[Step]:
        """Yield the changes of blocks that a piece of the answer causes."""
        if delta.reasoning:
            yield from self._grow(BlockKind.THOUGHTS, delta.reasoning)
        # Scores may come after their text, but only while it is open.
        if delta.text or (delta.text_scores and self._open is not None and self._open.kind is BlockKind.TEXT):
            yield from self._grow(BlockKind.TEXT, delta.text, delta.text_scores)
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

    def _grow(self, kind: BlockKind, piece: str, scores: tuple[TokenScore, ...] = ()) -> Iterator[Step]:
        if self._open is None or self._open.kind is not kind:
            yield from self.close()
            yield self._opened(kind)
        assert self._open is not None
        self._open.pieces.append(piece)
        self._open.scores += scores
        yield Step(block=self._open, piece=piece, scores=scores)

    def _opened(self, kind: BlockKind, *, call_id: str = "", name: str = "") -> Step:
        self._open = Block(kind=kind, index=len(self.blocks), call_id=call_id, name=name)
        self.blocks.append(self._open)
        return Step(block=self._open, opens=True)


def blocks_of(answer: Answer) -> list[Block]:
    """Return the blocks of a whole answer, the same as in its stream."""
    reader = BlockReader()
    for delta in answer.deltas:
        deque(reader.feed(delta), maxlen=0)
    return reader.blocks
