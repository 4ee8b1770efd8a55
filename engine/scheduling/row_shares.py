"""Shares out rows when there are more requests than rows: every flow is entitled to an equal share of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from engine.scheduling.live_request import LiveRequest, flow_of


def who_yields(
    running: Sequence[LiveRequest],
    waiting: Sequence[LiveRequest],
    num_rows: int,
    is_ready: Callable[[LiveRequest], bool],
) -> Iterator[tuple[LiveRequest, LiveRequest]]:
    """Yield the requests that give up their row, each with the request that it must wait behind.

    A flow below its share gets rows for its first waiting requests from flows above theirs, whose last request by rank
    yields first. A request that yields waits behind all requests that the other flow is entitled to run, and yields
    only once: it then runs to its end.

    Args:
        running: the requests that hold all rows; guests count toward no flow's share.
        is_ready: whether a waiting request could run if it had a row.
    """
    running = [live for live in running if not live.is_guest]
    held = Counter(flow_of(live.request) for live in running)
    asking = {flow_of(live.request) for live in waiting}
    share = max(1, num_rows // len(held.keys() | asking))
    if all(held[flow] >= share for flow in asking):
        return  # The common case; skips sorting a possibly long queue.
    queues: dict[object, list[LiveRequest]] = {}
    for live in sorted(waiting, key=lambda r: r.rank):
        queues.setdefault(flow_of(live.request), []).append(live)
    candidates = sorted((live for live in running if not live.has_yielded), key=lambda r: r.rank)
    for queue in queues.values():
        entitled = queue[: max(0, share - held[flow_of(queue[0].request)])]
        for _ in entitled if entitled and is_ready(entitled[0]) else ():
            place = next(
                (i for i in reversed(range(len(candidates))) if held[flow_of(candidates[i].request)] > share), None
            )
            if place is None:
                return
            victim = candidates.pop(place)
            held[flow_of(victim.request)] -= 1
            yield victim, entitled[-1]
