from __future__ import annotations

from pathlib import Path

from loadtest.measure import Exchange
from loadtest.plots import cdf_points, draw_all, tokens_in_bins


def exchange(started_s: float, event_ms: list[float], tokens: int) -> Exchange:
    return Exchange(
        workload="w",
        model="m",
        started_s=started_s,
        status=200,
        error=None,
        event_ms=event_ms,
        completion_tokens=tokens,
    )


def test_a_distribution_rises_to_one() -> None:
    assert cdf_points([3.0, 1.0]) == ([1.0, 3.0], [0.5, 1.0])
    assert cdf_points([]) == ([], [])


def test_tokens_fall_into_the_second_in_which_they_came() -> None:
    assert tokens_in_bins([exchange(10, [500, 1500], 4), exchange(11, [200], 1)]) == [2, 3]
    assert tokens_in_bins([exchange(10, [1000], 1)]) == [0, 1]
    assert tokens_in_bins([]) == []


def test_no_data_is_drawn_too(tmp_path: Path) -> None:
    assert all(path.exists() for path in draw_all({"empty": [exchange(0, [], 0)]}, tmp_path))
