"""Short prompts of flows that have nothing decoding go ahead of the others' decodes, in a step of their own.

A first token leaves with the step that draws it. Beside a flood of decodes that step takes as long as theirs, though
the prompt alone would take a fraction; the next tokens of the flood come later by that fraction. Pure: standard library
only.
"""

from __future__ import annotations

from engine.scheduling.live_request import flow_of
from engine.scheduling.step_costs import StepCosts
from engine.scheduling.step_draft import StepDraft

MAX_SHARE = 0.5
"""Of the time of the step with all decodes: a longer one of its own gains too little for what it costs the others."""


class OwnSteps:
    """Which steps are of prompts only. There are never two in a row, or newcomers could hold up decodes for ever."""

    def __init__(self, costs: StepCosts) -> None:
        self._costs = costs
        self._was_own = False

    def choose(self, draft: StepDraft) -> None:
        """Take the decodes out of a draft whose prompts are better off without them."""
        self._was_own = not self._was_own and self._pays(draft)
        if self._was_own:
            draft.drop_decodes()

    def _pays(self, draft: StepDraft) -> bool:
        if draft.only_decodes:
            return False
        decodes = draft.decodes()
        newcomers = {flow_of(live.request) for live in draft.first_tokens()}
        if not newcomers - {flow_of(live.request) for live in decodes}:
            return False
        num_tokens = draft.num_prompt_tokens
        own_s = self._costs.prompts_alone_s(num_tokens)
        full_s = self._costs.step_s(len(decodes)) + self._costs.prompt_s(num_tokens)
        return own_s is not None and own_s <= MAX_SHARE * full_s
