"""The admission of a request's answers, asked for once: a limit lets all of them begin, or none.

Asked for one by one, some would be counted and begun before another is refused; and a request whose prompts together
exceed a minute's tokens would be refused forever, though a single prompt of that size may begin.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from deployments.accounts.values import Admission
from deployments.waits import detached


class JointAdmission:
    """One admission for several answers.

    Args:
        ask: asks for it, given the estimated input tokens of all answers and their number.
    """

    def __init__(self, ask: Callable[[int, int], Coroutine[None, None, Admission]]) -> None:
        self._ask = ask
        self._input_tokens = self._num_answers = 0
        self._asked: asyncio.Task[Admission] | None = None

    @property
    def is_asked(self) -> bool:
        """Whether it has been asked for; no answer can be added then."""
        return self._asked is not None

    def add(self, input_tokens: int) -> None:
        """Add an answer with its estimated input tokens."""
        self._input_tokens += input_tokens
        self._num_answers += 1

    async def told(self) -> Admission:
        """Return the admission; the first of the answers that begins asks for it."""
        if self._asked is None:
            # A task, which begins behind the other answers' and so finds all of them counted as running.
            self._asked = detached(self._ask(self._input_tokens, self._num_answers))
        return await asyncio.shield(self._asked)
