"""The admission of all answers of one request, which `deployments.accounts.meter` asks for once. For one event loop."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from deployments.accounts.values import Admission, TenantLimits


@dataclass(slots=True, eq=False)
class JointAdmission:
    """The admission of a request's answers, asked for once: a limit lets all of them begin, or none.

    Asked for one by one, some would be counted and begun before another is refused; and a request whose prompts
    together exceed a minute's tokens would be refused forever, though a single prompt of that size may begin.

    Attributes:
        input_tokens: estimated, of all answers.
        num_waiting: answers that wait for it; one that is cancelled meanwhile does not any more.
        is_admitted: whether the answers may begin; each that waited then is counted as running.
        asked: the call that asks for it; None until the first of the answers begins. No answer can be added then.
    """

    tenant: str
    limits: TenantLimits
    input_tokens: int = 0
    num_answers: int = 0
    num_waiting: int = 0
    is_admitted: bool = False
    asked: asyncio.Task[Admission] | None = None

    def add(self, input_tokens: int) -> None:
        """Add an answer with its estimated input tokens."""
        self.input_tokens += input_tokens
        self.num_answers += 1
