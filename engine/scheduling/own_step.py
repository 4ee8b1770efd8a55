"""Computes short prompts of flows that have nothing running in a step of their own.

A first token leaves with the step that draws it. Beside many decodes or the chunks of a long prompt, that step takes
far longer than the short prompt alone would. On a CPU an own step even runs before the rest of the step in flight,
which pauses before a norm, between layers or within one. Other requests lose only the fixed cost of a step: they would
have shared the time of the prompt itself anyway. A prompt that would keep streams waiting for longer than they may is
cut into a few such steps, which take turns with those of the others. Pure: standard library only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from engine.scheduling.live_request import BY_RANK, LiveRequest, flow_of
from engine.scheduling.step_costs import StepCosts
from engine.scheduling.step_draft import StepDraft

MAX_SHARE = 0.5
"""Largest fixed cost of a step, as a share of the others' steps not waited for, at which an own step gains enough."""
MAX_PRICE = 0.04
"""Bound on the cost of all own steps, as a share of the others' time: if each request is a flow, all are newcomers."""
MAX_AT_ONCE = 4
"""Own steps in a burst after a long time without any; they still alternate with steps of the others."""
MAX_PARTS = 3
"""Own steps of one prompt: the longer it is, the smaller the part of its TTFT that it waits for others."""


def newcomers(
    running: Sequence[LiveRequest],
    waiting: Sequence[LiveRequest],
    draft: StepDraft,
    num_to_compute: Callable[[LiveRequest], int],
) -> Iterator[LiveRequest]:
    """Yield the requests of flows with nothing else running, by rank, up to the first that gets no share of the step.

    Besides those that wait, these are prompts that were begun, unless a step in flight computes them. They never
    overtake a waiting request of better rank, so that an endless stream of newcomers starves nobody. All may decode in
    the next step, so there are no more of them than tokens that its budget has beside all decodes.
    """
    num_free = draft.budget - sum(live.is_decoding for live in running)
    num_by_flow = Counter(flow_of(live.request) for live in running)
    begun = [live for live in running if live.is_begun and num_by_flow[flow_of(live.request)] == 1]
    for live in sorted([*begun, *waiting], key=BY_RANK)[: max(0, num_free)]:
        if live.wants_scores or (live.row is None and flow_of(live.request) in num_by_flow):
            return
        num_tokens = num_to_compute(live) if live.row is None else live.num_wanted
        # Only the first is cut: the rest of this step may be a small part of another, which needs a second one anyway.
        if num_tokens > draft.num_left * (MAX_PARTS if draft.is_empty else 1):
            return
        yield live


class OwnSteps:
    """Decides when newcomers get an own step: never twice without progress of the others, who could wait forever.

    Args:
        max_s: seconds that one may take; None if only the budget applies.
    """

    def __init__(self, costs: StepCosts, max_s: float | None = None) -> None:
        self._costs = costs
        self._max_s = max_s
        self._others_s = self._owed_s = 0.0
        self.may_be = True
        """Whether another step has begun, or has ended after its pause, since the last own step."""

    def note(self, num_decodes: int, num_prompt_tokens: int, num_pairs: float = 0, *, is_own: bool) -> None:
        """Record a step that begins; `num_pairs` as in `StepCosts.prompt_s`."""
        self.may_be = not is_own
        if is_own:
            self._owed_s += self._costs.base_s or 0.0
        else:
            self._others_s = self._costs.step_s(num_decodes) + self._costs.prompt_s(num_prompt_tokens, num_pairs)
            self._owed_s = max(0.0, self._owed_s - MAX_PRICE * self._others_s)

    def cap(self, prefill_cap: int | None) -> int | None:
        """Return how many tokens an own step computes, given how many prompt tokens a step beside decodes does."""
        token_s = self._costs.prompt_s(1)
        if prefill_cap is None or self._max_s is None or not token_s:
            return prefill_cap
        return max(prefill_cap, int((self._max_s - (self._costs.base_s or 0.0)) / token_s))

    def pays(self, running: Sequence[LiveRequest], waiting: Sequence[LiveRequest], num_spared: int = 1) -> bool:
        """Whether an own step is allowed now and worth its cost, judged by the others' last step.

        Args:
            num_spared: steps of the others that newcomers need not wait for: the next one, or that and the rest of one
                that was paused.
        """
        base_s = self._costs.base_s
        if base_s is None or not (self.may_be and running):
            return False
        if base_s > MAX_SHARE * num_spared * self._others_s or self._owed_s + base_s > MAX_AT_ONCE * base_s:
            return False
        return bool(waiting) or any(live.is_begun for live in running)
