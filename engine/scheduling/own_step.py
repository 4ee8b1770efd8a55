"""Short prompts of flows that have nothing running are computed by themselves, in a step of their own.

A first token leaves with the step that draws it. Beside a flood of decodes or the chunks of a long prompt that step
takes as long as theirs, though the prompt alone would take a fraction. On a CPU it even goes before the rest of the
step under way, which waits between two layers. The others lose what a step costs whatever it computes; the time of the
prompt itself they would have shared in any case. Pure: standard library only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter

from engine.scheduling.live_request import LiveRequest, flow_of
from engine.scheduling.step_costs import StepCosts

MAX_SHARE = 0.5
"""What a step costs whatever it computes, of the time of the others' step: more would buy too little."""
MAX_PRICE = 0.04
"""What all of them may cost the others, of their time: where every request is of another flow, each is a newcomer."""
MAX_AT_ONCE = 4
"""So many may follow each other, with a step of the others between two, where there was none for long."""


def newcomers(running: Sequence[LiveRequest], waiting: Sequence[LiveRequest]) -> Iterator[LiveRequest]:
    """Yield whom a step of its own is for: those of flows with nothing running, as long as they are next by rank.

    Whoever has a better rank is never overtaken, and so an endless row of newcomers starves nobody.
    """
    busy = {flow_of(live.request) for live in running}
    for live in sorted(waiting, key=attrgetter("rank")):
        if flow_of(live.request) in busy or live.wants_scores:
            return
        yield live


class OwnSteps:
    """When newcomers may have a step of their own: never twice in a row, or they could hold up the others for ever."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._others_s = self._owed_s = 0.0
        self.may_be = True
        """Whether the last step was one of the others'."""

    def note(self, num_decodes: int, num_prompt_tokens: int, *, is_own: bool) -> None:
        """Take note of a step that begins."""
        self.may_be = not is_own
        if is_own:
            self._owed_s += self._costs.base_s or 0.0
        else:
            self._others_s = self._costs.step_s(num_decodes) + self._costs.prompt_s(num_prompt_tokens)
            self._owed_s = max(0.0, self._owed_s - MAX_PRICE * self._others_s)

    def pays(self, running: Sequence[LiveRequest], waiting: Sequence[LiveRequest]) -> bool:
        """Whether there may be one now, and it is worth its price beside steps such as the others' last one."""
        base_s = self._costs.base_s
        if base_s is None or not (self.may_be and running and waiting):
            return False
        return base_s <= MAX_SHARE * self._others_s and self._owed_s + base_s <= MAX_AT_ONCE * base_s
