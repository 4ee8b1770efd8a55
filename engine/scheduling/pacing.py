"""Sizes the prefill share of a step from measured times, so that a long prompt does not hold up running streams.

Pure. The cost of a prompt token depends on the model, the processor, the context before it and other load. It is
measured continuously, and the next step takes as many prompt tokens as fit into the time that streams may wait.
"""

from __future__ import annotations

from engine.scheduling.step_costs import MIN_PROMPT_TOKENS

FIRST_TOKENS = 128
MIN_TOKENS = 16
"""With fewer a prompt would hardly advance; a step cannot be made shorter than its decodes anyway."""


class PrefillPace:
    """How many prompt tokens a step may compute beside decodes.

    Args:
        target_s: target duration of such a step; None if only the upper bound applies.
        max_tokens: upper bound.
    """

    def __init__(self, target_s: float | None, max_tokens: int) -> None:
        self._target_s = target_s
        self._max_tokens = max_tokens
        self.num_tokens = max_tokens if target_s is None else min(FIRST_TOKENS, max_tokens)

    def observe(self, num_prefill_tokens: int, took_s: float) -> None:
        """Record a step: move halfway to the count that would have met the target, or all the way if far over it."""
        if self._target_s is None or num_prefill_tokens < MIN_PROMPT_TOKENS or took_s <= 0:
            return
        fitting = num_prefill_tokens * self._target_s / took_s
        if took_s <= self._target_s and fitting < self.num_tokens:
            return  # It was in time, and short because there was no more to compute: most of it may be decodes.
        is_far_over = took_s > 1.5 * self._target_s and num_prefill_tokens <= self.num_tokens
        wanted = fitting if is_far_over else (self.num_tokens + fitting) / 2
        self.num_tokens = int(min(self._max_tokens, max(min(MIN_TOKENS, self._max_tokens), wanted)))
