"""What a step costs here, learned from the steps that were run. Pure: standard library only.

A step is taken to last

    base + per_row * decoding rows + per_token * prompt tokens

seconds. Base and row are a line through the steps that only decode, by least squares, the newest weighing most; a
prompt token is what that line leaves of the steps that compute prompts, and a token of a draft what all that leaves of
the steps that have drafts, of which nothing else is learned. What a step takes at least is not told by that
line where all steps have nearly as many rows; for steps of prompts alone it is learned from those.
"""

from __future__ import annotations

import math

MIN_STEPS = 8
"""Decode steps before anything is foretold from them: the first ones touch memory for the first time."""
MAX_AGE_S = 30.0
"""Estimates older than this are none: nobody may be refused for ever because of a machine that was busy once."""
MIN_PROMPT_TOKENS = 16
"""Steps with fewer prompt tokens say more about the decodes beside them."""
NEW_SHARE = 0.05
"""Weight of the newest step; the first ones count alike."""
MIN_SPREAD = 0.25
"""Variance of the numbers of rows below which nothing new is said of what a row costs."""
MEMORY = 0.95
"""What a step still weighs one step later in the rates of prompt tokens and of drafts."""
MAX_SURPRISE = 4.0
"""One step counts as so many times what was expected of it at most: it may have waited for somebody else."""


class StepCosts:
    """How long steps take; the engine's thread writes, any thread may read."""

    def __init__(self) -> None:
        # Of the line through the decode steps: mean rows and seconds, variance, covariance, and its slope.
        self._mean_rows = self._mean_s = self._spread = self._joint_spread = self._row_s = 0.0
        self._prompt_token_s = 0.0
        self._draft_tokens = self._draft_tokens_s = 0.0
        self._prompt_tokens = self._prompt_steps_s = 0.0
        self._num_steps = self._num_prompt_steps = 0
        self._base_s, self._num_alone = 0.0, 0
        self._measured_at_s = 0.0

    def observe(
        self, *, num_decodes: int, num_prompt_tokens: int, num_draft_tokens: int = 0, took_s: float, now_s: float
    ) -> None:
        """Take note of a step."""
        if took_s <= 0:
            return
        if num_draft_tokens:
            without_s = self.step_s(num_decodes) + self.prompt_s(num_prompt_tokens)
            most_s = MAX_SURPRISE * (without_s + num_draft_tokens * self.draft_token_s)
            # Below nothing too: a step is as often shorter than was expected as longer.
            self._draft_tokens = MEMORY * self._draft_tokens + num_draft_tokens
            self._draft_tokens_s = MEMORY * self._draft_tokens_s + min(took_s, most_s) - without_s
            self._measured_at_s = now_s
            return
        is_decode = num_prompt_tokens < MIN_PROMPT_TOKENS
        expected_s = self.step_s(num_decodes) + self.prompt_s(num_prompt_tokens)
        if min(self._num_steps, MIN_STEPS if is_decode else self._num_prompt_steps) >= MIN_STEPS and expected_s > 0:
            took_s = min(took_s, MAX_SURPRISE * expected_s)
        if is_decode:
            self._learn_decodes(num_decodes, took_s)
        else:
            self._prompt_tokens = MEMORY * self._prompt_tokens + num_prompt_tokens
            self._prompt_steps_s = MEMORY * self._prompt_steps_s + took_s
            if not num_decodes:
                self._num_alone += 1
                left_s = max(0.0, took_s - self.prompt_s(num_prompt_tokens))
                self._base_s += max(NEW_SHARE, 1 / self._num_alone) * (left_s - self._base_s)
            if self._num_steps >= MIN_STEPS:
                self._learn_prompt(num_prompt_tokens, max(0.0, took_s - self.step_s(num_decodes)))
        self._measured_at_s = now_s

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens computed a second, beside whatever else their steps held; 0 before any has been measured."""
        return self._prompt_tokens / self._prompt_steps_s if self._prompt_steps_s else 0.0

    @property
    def has_decode_steps(self) -> bool:
        """Whether enough of them were measured."""
        return self._num_steps >= MIN_STEPS

    def is_known(self, now_s: float) -> bool:
        """Whether enough was measured, and not long ago."""
        return self.has_decode_steps and now_s - self._measured_at_s <= MAX_AGE_S

    def step_s(self, num_rows: int) -> float:
        """Return the seconds of a step in which so many rows decode."""
        return max(0.0, self._mean_s + self._row_s * (num_rows - self._mean_rows))

    def steps(self, seconds: float, num_rows: int) -> float:
        """Return how many steps of so many rows a time is worth; 0 where nothing has been measured."""
        step_s = self.step_s(num_rows)
        return seconds / step_s if step_s else 0.0

    def prompt_s(self, num_tokens: float) -> float:
        """Return the seconds that prompt tokens add to the steps that compute them."""
        return self._prompt_token_s * num_tokens

    def saved_s(self, num_rows: int, num_tokens: int) -> float:
        """Return how much later than after one step beside so many rows prompt tokens would be computed, in seconds.

        Whoever fetches them instead joins the step after next; before anything is measured that always pays.
        """
        return self.prompt_s(num_tokens) - self.step_s(num_rows) if self._num_prompt_steps else math.inf

    @property
    def draft_token_s(self) -> float:
        """What a token of a draft adds to its step, in seconds; before any was measured what one of a prompt does.

        It is no more than some of a prompt: for want of drafts nobody would learn that it has become less.
        """
        if not self._draft_tokens:
            return self._prompt_token_s
        measured_s = max(0.0, self._draft_tokens_s / self._draft_tokens)
        return min(measured_s, MAX_SURPRISE * self._prompt_token_s or measured_s)

    @property
    def base_s(self) -> float | None:
        """What a step of prompts alone takes beyond its prompt tokens, in seconds; None before any was measured."""
        return self._base_s if self._num_alone and self._num_prompt_steps else None

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
        # A step without rows would take no less than nothing.
        self._row_s = min(self._row_s, self._mean_s / max(1.0, self._mean_rows))

    def _learn_prompt(self, num_tokens: int, left_s: float) -> None:
        self._num_prompt_steps += 1
        weight = max(NEW_SHARE, 1 / self._num_prompt_steps)
        self._prompt_token_s += weight * (left_s / num_tokens - self._prompt_token_s)
