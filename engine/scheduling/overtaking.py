"""Lets short prompts past one that takes many steps. Pure: standard library only.

By rank alone, a prompt takes all that a step has for prompts until it is done, and a question that arrives after a
document of its flow (of any user, if the server knows no tenants) waits for the document: for seconds to minutes.
Instead it leaves a half of its share of each step to prompts that need a fraction of its steps. It takes at most twice
as long, while there are such, and they wait as if only others of their kind were before them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import chain

from engine.scheduling.live_request import BY_RANK, LiveRequest
from engine.scheduling.rows import Rows
from engine.scheduling.step_draft import StepDraft

MIN_RATIO = 8
"""A prompt passes another that has at least so many times as many tokens left to compute."""
MAX_LOOKUPS = 16
"""In each step, for so many waiting prompts it is looked up what the cache holds of them."""


def passes(num_tokens: float, num_before: float) -> bool:
    """Whether a prompt of `num_tokens` passes one that has `num_before` tokens left, if no deadline is at risk.

    Whoever might miss one relies on what was before it when it was admitted.
    """
    return num_tokens * MIN_RATIO <= num_before


def in_turn(
    candidates: Iterable[LiveRequest],
    draft: StepDraft,
    rows: Rows,
    num_lacking: Callable[[LiveRequest], int],
    is_at_risk: Callable[[LiveRequest], bool],
) -> Iterator[LiveRequest]:
    """Yield the requests that may take a share of the step, each when it is its turn.

    The order is that of rank up to the first that begins or goes on, and that the step cannot complete. Half of its
    share is held back for those that pass it; they follow, and it comes again, for what they have left. None passes a
    prompt whose tokens are scored: rows of logits are what bounds that one.

    Args:
        rows: those of the engine, from which whoever is admitted has taken one before the next is asked for.
        num_lacking: returns how many tokens of a waiting request are not in the cache.
        is_at_risk: returns whether a request might miss its deadline if others passed; then none does.
    """
    ordered = sorted(candidates, key=BY_RANK)
    # Asked once, and only if it matters: of each it is a forecast.
    keeps_order = cache(lambda: any(map(is_at_risk, ordered)))
    for place, live in enumerate(ordered, start=1):
        share, end = draft.share(live), draft.end_of(live)
        if not share:
            return
        if live.wants_scores or end + share == live.num_tokens or keeps_order():
            yield live
            continue
        draft.num_held_back = share // 2
        yield live
        draft.num_held_back = 0
        begun = draft.end_of(live)
        # One that waits, and cannot begin, is passed by all.
        if begun == end or begun == live.num_tokens:
            continue
        # The cache may have held so much of it that the step completes it.
        completes = begun + draft.share(live) == live.num_tokens
        for other in chain(() if completes else _passing(live, ordered[place:], rows, num_lacking), (live,)):
            if draft.share(other):
                yield other
        if not completes:
            return


def _passing(
    live: LiveRequest, behind: Sequence[LiveRequest], rows: Rows, num_lacking: Callable[[LiveRequest], int]
) -> Iterator[LiveRequest]:
    """Yield those behind a request that pass it: a turn of a chat does whose long past is in the cache.

    They take no row that was promised: whoever has a deadline was admitted with a row for each that waits before it.
    """
    passing: list[LiveRequest] = []
    num_lookups = num_staying = num_promised = 0
    for other in behind:
        num_tokens = other.num_wanted
        waits = other.row is None
        if waits and num_lookups < MAX_LOOKUPS and not passes(num_tokens, live.num_wanted):
            num_lookups += 1
            num_tokens = num_lacking(other)
        if passes(num_tokens, live.num_wanted):
            passing.append(other)
        elif waits:
            num_staying += 1
            if other.request.deadline_s is not None:
                num_promised = num_staying
    for other in passing:
        if other.row is not None or rows.num_left > num_promised:
            yield other
