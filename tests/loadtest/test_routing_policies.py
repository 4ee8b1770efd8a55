from __future__ import annotations

import random

from deployments.routing.report import LoadReport
from loadtest.routing_fleet import Replica, Turn
from loadtest.routing_policies import POLICIES

IDS = ["a", "b", "c"]
TURN = Turn(5, None, (1, 2), 600, 10, 0)


def test_each_policy_looks_at_what_it_is_named_for() -> None:
    replicas = [Replica(name) for name in IDS]
    replicas[0].serve(TURN, "r", 0, 0.0)
    replicas[2].serve(TURN, "s", 0, 0.0)
    policies = {name: make(IDS, random.Random(1)) for name, make in POLICIES.items()}
    report = LoadReport(
        model="m", replica_id="c", landmark_blocks=1, block_tokens=256, is_whole=True, landmarks_added=(1, 2)
    )
    for policy in policies.values():
        policy.hear(report, 0.0)
        policy.end("unknown")

    def chosen(name: str, session: int = 5) -> set[int]:
        return {policies[name].choose(TURN.asked(f"{name}{i}"), session, replicas, 0.0) for i in range(20)}

    # Of any two, one is never the fullest.
    assert 1 in chosen("power of two")
    assert len(chosen("session hash")) == 1
    assert {place for session in range(30) for place in chosen("session hash", session)} == {0, 1, 2}
    assert chosen("prefix only") == {2}
    assert policies["expected first token"].choose(TURN.asked("x"), 5, replicas, 0.0) == 2
