from __future__ import annotations

from deployments.routing import demand
from deployments.routing.demand import MAX_ADAPTERS, AdapterDemand


def test_a_hot_adapter_deserves_more_replicas_and_a_cold_one_one() -> None:
    asked = AdapterDemand()
    for step in range(1000):
        asked.note(1, 0.15, step / 10)
    asked.note(2, 0.15, 100.0)
    assert abs(asked.share(1, 100.0) - 1.5) < 0.1
    assert asked.num_homes(1, 100.0, 1) == 3 + 1 or asked.num_homes(1, 100.0, 1) == 3
    assert asked.num_homes(1, 100.0, 2) > asked.num_homes(1, 100.0, 1)
    assert asked.num_homes(2, 100.0, 1) == asked.num_homes(3, 100.0, 1) == 1
    assert asked.num_homes(1, 100.0 + 10 * demand.MEMORY_S, 1) == 1


def test_no_more_adapters_are_kept_than_the_bound() -> None:
    asked = AdapterDemand()
    for adapter in range(MAX_ADAPTERS + 10):
        asked.note(adapter, 1.0, 0.0)
        asked.note(1, 1.0, 0.0)
    assert len(asked._by_adapter) == MAX_ADAPTERS
    assert asked.share(0, 0.0) == 0.0 < asked.share(MAX_ADAPTERS + 9, 0.0)
    assert asked.share(1, 0.0) > MAX_ADAPTERS / demand.MEMORY_S
