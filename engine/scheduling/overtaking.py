"""Lets short prompts past one that takes many steps. Pure: standard library only.

By rank alone, a prompt takes all that a step has for prompts until it is done, and a question that arrives after a
document of its flow (of any user, if the server knows no tenants) waits for the document: for seconds to minutes.
Instead it leaves a half of its share of each step to prompts that need a fraction of its steps. It takes at most twice
as long, while there are such, and they wait as if only others of their kind were before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from engine.scheduling.live_request import BY_RANK, LiveRequest
from engine.scheduling.step_draft import StepDraft

MIN_RATIO = 8
"""A prompt passes another that has at least so many times as many tokens left to compute."""


def passes(num_tokens: float, num_before: float) -> bool:
    """Whether a prompt of `num_tokens` passes one that has `num_before` tokens left, if nobody has a deadline.

    Deadlines are kept by order: whoever is admitted with one relies on what was before it.
    """
    return num_tokens * MIN_RATIO <= num_before


def in_turn(candidates: Iterable[LiveRequest], draft: StepDraft) -> Iterator[LiveRequest]:
    """Yield the requests that may take a share of the step, each when it is its turn.

    The order is that of rank up to the first that the step cannot complete. That one comes with a half of its share
    held back if there are others that pass it; they follow, and it comes again, for what they have left. None passes a
    prompt whose tokens are scored: rows of logits are what bounds that one.
    """
    ordered = sorted(candidates, key=BY_RANK)
    has_deadlines = any(live.request.deadline_s is not None for live in ordered)
    for place, live in enumerate(ordered):
        share, end = draft.share(live), draft.end_of(live)
        if not share:
            return
        others: list[LiveRequest] = []
        if end + share < live.num_tokens and not has_deadlines and not live.wants_scores:
            others = [other for other in ordered[place + 1 :] if passes(other.num_wanted, live.num_wanted)]
        with draft.holding_back(share // 2 if others else 0):
            yield live
        if others and draft.end_of(live) > end:
            yield from (other for other in others if draft.share(other))
            if draft.share(live):
                yield live
            return
