"""Computes short prompts of flows that have nothing running in a step of their own.

A first token leaves with the step that draws it. Beside many decodes or the chunks of a long prompt, that step takes
far longer than the short prompt alone would. On a CPU an own step even runs before the rest of the step in flight,
which pauses before a norm, between layers or within one. Other requests lose only the fixed cost of a step: they would
have shared the time of the prompt itself anyway. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.scheduling.live_request import BY_RANK, LiveRequest, flow_of
from engine.scheduling.step_costs import StepCosts

MAX_SHARE = 0.5
"""Largest fixed cost of a step, as a share of the others' step, at which an own step still gains enough."""
MAX_PRICE = 0.04
"""Bound on the cost of all own steps, as a share of the others' time: if each request is a flow, all are newcomers."""
MAX_AT_ONCE = 4
"""Own steps in a burst after a long time without any; they still alternate with steps of the others."""


def newcomers(running: Sequence[LiveRequest], waiting: Sequence[LiveRequest]) -> Iterator[LiveRequest]:
    """Yield the waiting requests of flows with nothing running, by rank, up to the first that is not eligible.

    They never overtake a waiting request of better rank, so that an endless stream of newcomers starves nobody.
    """
    busy = {flow_of(live.request) for live in running}
    for live in sorted(waiting, key=BY_RANK):
        if flow_of(live.request) in busy or live.wants_scores:
            return
        yield live


class OwnSteps:
    """Decides when newcomers get an own step: never twice in a row, which could hold up the others forever."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._others_s = self._owed_s = 0.0
        self.may_be = True
        """Whether the last step was not an own step."""

    def note(self, num_decodes: int, num_prompt_tokens: int, num_pairs: float = 0, *, is_own: bool) -> None:
        """Record a step that begins; `num_pairs` as in `StepCosts.prompt_s`."""
        self.may_be = not is_own
        if is_own:
            self._owed_s += self._costs.base_s or 0.0
        else:
            self._others_s = self._costs.step_s(num_decodes) + self._costs.prompt_s(num_prompt_tokens, num_pairs)
            self._owed_s = max(0.0, self._owed_s - MAX_PRICE * self._others_s)

    def pays(self, running: Sequence[LiveRequest], waiting: Sequence[LiveRequest]) -> bool:
        """Whether an own step is allowed now and worth its cost, judged by the others' last step."""
        base_s = self._costs.base_s
        if base_s is None or not (self.may_be and running and waiting):
            return False
        return base_s <= MAX_SHARE * self._others_s and self._owed_s + base_s <= MAX_AT_ONCE * base_s
