"""Shares out rows when there are more requests than rows: every flow is entitled to an equal share of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from engine.request import Request
from engine.scheduling.live_request import BY_RANK, LiveRequest, flow_of


def who_yields(
    running: Sequence[LiveRequest],
    waiting: Sequence[LiveRequest],
    num_rows: int,
    is_ready: Callable[[LiveRequest], bool],
) -> Iterator[tuple[LiveRequest, LiveRequest]]:
    """Yield the requests that give up their row, each with the request that it must wait behind.

    A flow below its share gets rows for its first waiting requests from flows above theirs, whose last request by rank
    yields first, unless it has priority. A request that yields waits behind all requests that the other flow is
    entitled to run, and yields only once: it then runs to its end. Nobody yields while a flow that has its share waits
    with a request that comes first by rank: that one would get the row.

    Args:
        running: the requests that hold all rows; guests count toward no flow's share.
        is_ready: whether a waiting request could run if it had a row.
    """
    held = _held(running)
    asking = {flow_of(live.request) for live in waiting}
    share = max(1, num_rows // len(held.keys() | asking))
    if all(held[flow] >= share for flow in asking):
        return  # The common case; skips sorting a possibly long queue.
    queues: dict[object, list[LiveRequest]] = {}
    for live in sorted(waiting, key=BY_RANK):
        queues.setdefault(flow_of(live.request), []).append(live)
    candidates = sorted(_may_yield(running), key=BY_RANK)
    for queue in queues.values():
        if not is_ready(queue[0]):
            continue
        entitled = queue[: max(0, share - held[flow_of(queue[0].request)])]
        if not entitled:
            return
        for asker in entitled:
            victim = _last_above(candidates, held, share, asker.request.priority)
            if victim is None:
                break
            candidates.remove(victim)
            held[flow_of(victim.request)] -= 1
            yield victim, entitled[-1]


def takes_row(request: Request, running: Sequence[LiveRequest], asking: Iterable[Request], num_rows: int) -> bool:
    """Return whether a request that is not queued yet would be yielded a row, by the rule of `who_yields`.

    Args:
        asking: the requests without a row.
    """
    flow, held, asked = flow_of(request), _held(running), Counter(map(flow_of, asking))
    share = max(1, num_rows // len({flow, *held, *asked}))
    if held[flow] + asked[flow] >= share:
        return False
    return _last_above(_may_yield(running), held, share, request.priority) is not None


def _held(running: Iterable[LiveRequest]) -> Counter[Any]:
    """Return the number of rows of each flow."""
    return Counter(flow_of(live.request) for live in running if not live.is_guest)


def _may_yield(running: Iterable[LiveRequest]) -> list[LiveRequest]:
    return [live for live in running if not (live.is_guest or live.has_yielded)]


def _last_above(
    candidates: Sequence[LiveRequest], held: Mapping[Any, int], share: int, priority: int
) -> LiveRequest | None:
    """Return the last candidate of a flow above its share that has no better priority than this; lower is better."""
    return next(
        (
            live
            for live in reversed(candidates)
            if held[flow_of(live.request)] > share and live.request.priority >= priority
        ),
        None,
    )
