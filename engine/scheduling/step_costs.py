"""Learns the cost of a step on this machine from the steps that were run. Pure: standard library only.

A step is modeled to last

    base + per_row * decoding rows + per_token * prompt tokens + per_pair * pairs of a prompt token and one before it

seconds. `base` and `per_row` are a least-squares line through the steps that only decode, weighted toward the newest.
`per_token` is what that line leaves unexplained in steps that compute the beginnings of prompts, and `per_pair` what
both leave unexplained far behind: there, attention takes most of the time, which must not be charged to short prompts.
The cost of a draft token is what all of these leave unexplained in steps with drafts, from which nothing else is
learned. The line says little about the fixed cost of a step if all steps have about as many rows, so for steps of
prompts alone it is learned from such steps.
"""

from __future__ import annotations

import math

from engine.step import pairs_of

MIN_STEPS = 8
"""Decode steps before anything is predicted from them: the first ones touch memory for the first time."""
MAX_AGE_S = 30.0
"""Older estimates refuse nobody who has the engine alone: one that was slow once must not cause refusals forever."""
MIN_PROMPT_TOKENS = 16
"""The time of a step with fewer prompt tokens is dominated by its decodes."""
NEW_SHARE = 0.05
"""Weight of the newest step; the first ones are weighted equally."""
MIN_SPREAD = 0.25
"""Variance of the number of rows below which the cost of a row is not updated."""
MEMORY = 0.95
"""Decay per step of earlier steps in the rates of prompt tokens and of draft tokens."""
BEGINNING_TOKENS = 2048
"""A prompt's tokens begin it if they have on average at most this many before them."""
MAX_SURPRISE = 4.0
"""A step counts for at most this many times its expected time: it may have waited for something else."""


class _Rate:
    """The seconds of one of what steps compute: a quotient of two sums, in which each step counts less with time.

    Not a mean of the steps' quotients: a few tokens in a step that something else held up would outweigh a long prompt.

    Attributes:
        amount: how many there were, as far as they still count.
        unit_s: the seconds of one; 0 before there were any.
    """

    def __init__(self) -> None:
        self.amount = self.unit_s = self._seconds = 0.0

    def add(self, amount: float, seconds: float) -> None:
        """Record that a step had so many, which took so long."""
        self.amount = MEMORY * self.amount + amount
        self._seconds = MEMORY * self._seconds + seconds
        self.unit_s = self._seconds / self.amount


class StepCosts:
    """Estimates how long steps take; written by the engine's thread, readable from any thread."""

    def __init__(self) -> None:
        # The line through the decode steps: mean rows and seconds, variance, covariance, and slope.
        self._mean_rows = self._mean_s = self._spread = self._joint_spread = self._row_s = 0.0
        # Prompt tokens at the cost of their whole steps, and what tokens, pairs and draft tokens add to a step.
        self._prompt_steps = _Rate()
        self._prompts, self._pairs, self._drafts = _Rate(), _Rate(), _Rate()
        self._num_steps = self._num_prompt_steps = 0
        self._base_s, self._num_alone = 0.0, 0
        self._measured_at_s = 0.0

    def observe(
        self,
        *,
        num_decodes: int,
        num_prompt_tokens: int,
        num_pairs: float = 0,
        num_draft_tokens: int = 0,
        took_s: float,
        now_s: float,
    ) -> None:
        """Record a step."""
        if took_s <= 0:
            return
        if num_draft_tokens:
            without_s = self.step_s(num_decodes) + self.prompt_s(num_prompt_tokens, num_pairs)
            most_s = MAX_SURPRISE * (without_s + num_draft_tokens * self.draft_token_s)
            # May be negative: steps are as often shorter than expected as longer.
            self._drafts.add(num_draft_tokens, min(took_s, most_s) - without_s)
            self._measured_at_s = now_s
            return
        is_decode = num_prompt_tokens < MIN_PROMPT_TOKENS
        expected_s = self.step_s(num_decodes) + self.prompt_s(num_prompt_tokens, num_pairs)
        if min(self._num_steps, MIN_STEPS if is_decode else self._num_prompt_steps) >= MIN_STEPS and expected_s > 0:
            took_s = min(took_s, MAX_SURPRISE * expected_s)
        if is_decode:
            self._learn_decodes(num_decodes, took_s)
        else:
            self._prompt_steps.add(num_prompt_tokens, took_s)
            if self._num_steps >= MIN_STEPS:
                self._learn_prompt(num_prompt_tokens, num_pairs, max(0.0, took_s - self.step_s(num_decodes)))
                if not num_decodes:
                    # Only now: before the cost of a token is known, the whole step would count as its fixed cost.
                    self._learn_base(max(0.0, took_s - self.prompt_s(num_prompt_tokens, num_pairs)))
        self._measured_at_s = now_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens computed per second, whatever else their steps held; 0 before any is measured."""
        return 1 / self._prompt_steps.unit_s if self._prompt_steps.unit_s else 0.0

    @property
    def has_decode_steps(self) -> bool:
        """Whether enough decode steps were measured."""
        return self._num_steps >= MIN_STEPS

    def is_known(self, now_s: float) -> bool:
        """Whether enough was measured, and recently."""
        return self.has_decode_steps and now_s - self._measured_at_s <= MAX_AGE_S

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a step in which `num_rows` rows decode."""
        return max(0.0, self._mean_s + self._row_s * (num_rows - self._mean_rows))

    def steps(self, seconds: float, num_rows: int) -> float:
        """Return how many steps of `num_rows` rows fit in a time; 0 if nothing was measured."""
        step_s = self.step_s(num_rows)
        return seconds / step_s if step_s else 0.0

    def prompt_s(self, num_tokens: float, num_pairs: float = 0.0) -> float:
        """Return the seconds that prompt tokens add to the steps that compute them; 0 before any are measured.

        Args:
            num_pairs: pairs of one of these tokens and one before it; 0 leaves out what they take.
        """
        return num_tokens * self._prompts.unit_s + num_pairs * self._pair_s

    def saved_s(self, num_rows: int, num_tokens: int) -> float:
        """Return the seconds that fetching prompt tokens may take and still beat computing them beside `num_rows` rows.

        A request whose tokens are fetched joins one step later. Infinite before prompt tokens are measured.
        """
        if not self._num_prompt_steps:
            return math.inf
        return self.prompt_s(num_tokens, pairs_of(0, num_tokens)) - self.step_s(num_rows)

    @property
    def draft_token_s(self) -> float:
        """Seconds that a draft token adds to its step; before any is measured, those of a prompt token.

        Capped at a few prompt tokens: an overestimate would stop all drafts, and so would never be corrected.
        """
        if not self._drafts.amount:
            return self.prompt_s(1)
        measured_s = max(0.0, self._drafts.unit_s)
        return min(measured_s, MAX_SURPRISE * self.prompt_s(1) or measured_s)

    @property
    def base_s(self) -> float | None:
        """Seconds that a step of prompts alone takes beyond its prompt tokens; None before any is measured."""
        return self._base_s if self._num_alone else None

    @property
    def fixed_s(self) -> float:
        """Seconds that one more step takes, whatever it computes; 0 before anything is measured."""
        return max(self.step_s(1), self.base_s or 0.0)

    def _learn_decodes(self, num_rows: int, took_s: float) -> None:
        self._num_steps += 1
        weight = max(NEW_SHARE, 1 / self._num_steps)
        off_rows, off_s = num_rows - self._mean_rows, took_s - self._mean_s
        self._mean_rows += weight * off_rows
        self._mean_s += weight * off_s
        self._spread = (1 - weight) * (self._spread + weight * off_rows * off_rows)
        self._joint_spread = (1 - weight) * (self._joint_spread + weight * off_rows * off_s)
        if self._spread >= MIN_SPREAD:
            self._row_s = max(0.0, self._joint_spread / self._spread)
        # A step without rows must not take negative time.
        self._row_s = min(self._row_s, self._mean_s / max(1.0, self._mean_rows))

    @property
    def _pair_s(self) -> float:
        return max(0.0, self._pairs.unit_s)

    def _learn_prompt(self, num_tokens: int, num_pairs: float, left_s: float) -> None:
        self._num_prompt_steps += 1
        if num_pairs > BEGINNING_TOKENS * num_tokens and self._prompts.amount:
            self._pairs.add(num_pairs, left_s - self.prompt_s(num_tokens))
        else:
            self._prompts.add(num_tokens, max(0.0, left_s - num_pairs * self._pair_s))

    def _learn_base(self, left_s: float) -> None:
        self._num_alone += 1
        self._base_s += max(NEW_SHARE, 1 / self._num_alone) * (left_s - self._base_s)
