from __future__ import annotations

from deployments.round_robin import RoundRobin


def test_groups_take_turns_and_each_keeps_its_order() -> None:
    queue = RoundRobin[str]()
    queue.add(["a1", "a2", "a3"])
    queue.add([])
    queue.add(["b1"])
    seen = [queue.pop()]
    queue.add(["c1", "c2"])
    while (first := queue.first()) is not None:
        seen.append(queue.pop())
        assert seen[-1] == first
    assert seen == ["a1", "b1", "a2", "c1", "a3", "c2"]
