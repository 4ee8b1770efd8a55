from __future__ import annotations

from adapters.loads import AdapterLoads


def test_loads_add_up_and_later_ones_count_more_in_the_average() -> None:
    loads = AdapterLoads()
    loads.add(100, 4.0)
    assert loads.average_s == 4.0
    loads.add(10, 1.0)
    assert (loads.num_loaded, loads.num_bytes, loads.seconds, loads.average_s) == (2, 110, 5.0, 2.5)
