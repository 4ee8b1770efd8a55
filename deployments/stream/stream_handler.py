"""The text pipeline of one answer: token ids in, text that may be sent to the client out.

    token ids -> detokenizer -> stop strings -> output screen -> text

Each stage holds back text that it cannot decide on yet. Independent of where tokens come from and where text goes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from deployments.answer_events import TokenScore, Verdict
from deployments.stream.detokenizer import Detokenizer
from deployments.stream.harmony import HarmonyCounter
from deployments.stream.reasoning import ReasoningCounter
from deployments.stream.screening import OutputScreen
from deployments.stream.stop_strings import StopStrings

Judge = Callable[[Sequence[str]], Awaitable[Sequence[Verdict]]]
"""Returns the safety classifier's verdict on each text."""


class StreamHandler:
    """The stages of one answer. A single reader feeds it, in order.

    Args:
        screen: None if the answer is not screened; `judge` is never called then.
        reasoning: counts the tokens of the thoughts; None if the model does not reason.
        min_tokens: a stop string that is completed by one of this many first tokens is ignored.
        holds_ids: hold every token until its text is released; otherwise only those with scores.

    Attributes:
        detokenize_s: time that making text of tokens took, without its judgement.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: StopStrings,
        *,
        screen: OutputScreen | None,
        judge: Judge,
        reasoning: ReasoningCounter | HarmonyCounter | None = None,
        min_tokens: int = 0,
        holds_ids: bool = False,
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._screen = screen
        self._judge = judge
        self._reasoning = reasoning
        self._min_tokens = min_tokens
        self.stop: str | None = None
        self._is_closed = False
        self._holds_ids = holds_ids
        self._held: deque[HeldToken] = deque()
        self._num_chars_read = 0
        self._num_chars_left = 0
        self._left: list[str] = []
        self.num_tokens = 0
        self.detokenize_s = 0.0

    @property
    def is_cut(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.stop is not None

    @property
    def is_flagged(self) -> bool:
        """Whether the safety classifier has ended the text."""
        return self._screen is not None and bool(self._screen.flagged)

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._left)

    @property
    def num_reasoning_tokens(self) -> int:
        """How many of `num_tokens` belong to the thoughts."""
        return 0 if self._reasoning is None else self._reasoning.num_tokens

    async def feed(self, token_ids: Sequence[int], scores: Sequence[TokenScore] = ()) -> str:
        """Return the text that may be sent now. Tokens after a stop string are neither emitted nor counted.

        Args:
            scores: one for each token, or none at all.

        Raises:
            OverloadError: the classifier cannot be reached; no text is released unscreened.
        """
        pieces, begun_s = [], time.perf_counter()
        # One token at a time: where the answer ends must not depend on how its tokens were batched.
        for place, token_id in enumerate(token_ids):
            if self.is_cut:
                break
            self.num_tokens += 1
            text = self._detokenizer.feed(token_id)
            if self._reasoning is not None:
                self._reasoning.feed(text)
            start, self._num_chars_read = self._num_chars_read, self._num_chars_read + len(text)
            if scores or self._holds_ids:
                score = scores[place] if scores else None
                # The last bytes may be of a character that a later token ends.
                end = self._num_chars_read + ((score is None or bool(score.raw)) and self._detokenizer.holds_text)
                self._held.append(HeldToken(start, end, token_id, score))
            pieces.append(self._cut(text))
        self.detokenize_s += time.perf_counter() - begun_s
        return await self._screened("".join(pieces))

    def take_tokens(self, num_behind: int = 0) -> tuple[HeldToken, ...]:
        """Return the held tokens whose text was released since the last call.

        Args:
            num_behind: how many of the last released characters are left for another call.
        """
        if self._is_closed and not num_behind:
            left, self._held = self._held, deque()
            # If the text was cut or flagged, do not reveal tokens whose text is not emitted.
            hides = self.is_cut or self.is_flagged
            return tuple(token for token in left if not hides or token.start < self._num_chars_left)
        released = []
        while self._held and self._held[0].end <= self._num_chars_left - num_behind:
            released.append(self._held.popleft())
        return tuple(released)

    async def close(self) -> str:
        """Return the text held back. No `feed` may follow.

        Raises:
            OverloadError: as `feed`.
        """
        text = ""
        if not self.is_cut:
            text = self._cut(self._detokenizer.close())
        if not self.is_cut:
            text += self._stops.close()
        self._is_closed = True
        return await self._screened(text, is_last=True)

    def end(self, token_id: int, score: TokenScore | None) -> None:
        """Count the token that ends the answer, which has no text, and hold it if it has a score or all are held."""
        self.num_tokens += 1
        if score is not None or self._holds_ids:
            self._held.append(HeldToken(self._num_chars_read, self._num_chars_read, token_id, score))

    def _cut(self, text: str) -> str:
        self._stops.is_deaf = self.num_tokens <= self._min_tokens
        text, self.stop = self._stops.feed(text)
        return text

    async def _screened(self, text: str, *, is_last: bool = False) -> str:
        if self._screen is not None:
            windows = self._screen.feed(text)
            if is_last:
                windows += self._screen.close()
            verdicts = await self._judge(windows) if windows else ()
            text = "".join(map(self._screen.release, verdicts))
        self._num_chars_left += len(text)
        self._left.append(text)
        return text


class HeldToken(NamedTuple):
    """A token of an answer whose text spans [start, end), in characters of the answer's text."""

    start: int
    end: int
    token_id: int
    score: TokenScore | None
