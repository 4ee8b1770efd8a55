from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.measure import Exchange, Slo, median, percentile, read_exchanges, summarise, tokens_by_time


def exchange(**changes: object) -> Exchange:
    fields: dict[str, object] = {
        "workload": "chat",
        "model": "base",
        "started_s": 100.0,
        "status": 200,
        "error": None,
        "event_ms": [50.0, 60.0, 90.0],
        "end_ms": 95.0,
        "prompt_tokens": 20,
        "cached_tokens": 5,
        "completion_tokens": 5,
    }
    return Exchange(**(fields | changes))  # type: ignore[arg-type]


def test_times_are_read_off_the_events() -> None:
    one = exchange()
    assert one.ttft_ms == 50
    assert one.gaps_ms == [10, 30]
    assert one.tpot_ms == 10, "40 ms for the four tokens after the first"


def test_an_answer_without_text_has_no_times() -> None:
    silent = exchange(event_ms=[], completion_tokens=0)
    assert (silent.ttft_ms, silent.tpot_ms, silent.gaps_ms) == (None, None, [])


def test_one_token_has_no_time_between_tokens() -> None:
    assert exchange(event_ms=[50.0], completion_tokens=1).tpot_ms is None


@pytest.mark.parametrize(
    ("slo", "is_met"),
    [
        (Slo(), True),
        (Slo(ttft_ms=50, tpot_ms=10), True),
        (Slo(ttft_ms=49), False),
        (Slo(tpot_ms=9), False),
    ],
)
def test_an_objective_is_met_up_to_its_bound(slo: Slo, is_met: bool) -> None:
    assert slo.is_met_by(exchange()) is is_met


def test_a_failed_answer_meets_no_objective() -> None:
    assert not Slo().is_met_by(exchange(error="cut"))


def test_percentiles_are_linear_between_neighbours() -> None:
    assert percentile([3, 1, 2], 0.5) == 2
    assert percentile([0, 10], 0.9) == 9
    assert percentile([7], 0.99) == 7
    assert math.isnan(percentile([], 0.5))


def test_a_median_is_of_what_was_measured() -> None:
    assert median([5, math.nan, 3, 4]) == 4
    assert math.isnan(median([math.nan]))


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_lies_among_its_values(values: list[float], share: float) -> None:
    assert min(values) - 1e-6 <= percentile(values, share) <= max(values) + 1e-6


def test_rates_count_what_arrived_inside_the_window() -> None:
    early = exchange()
    late = exchange(started_s=100.95, event_ms=[40.0, 80.0], end_ms=90.0, completion_tokens=4)
    found = summarise([early, late], label="x", window_s=1.0)
    assert found.requests_per_s == 1
    assert found.output_tokens_per_s == 5 + 2
    assert found.num_requests == 2


def test_errors_count_against_goodput_but_not_in_latencies() -> None:
    found = summarise([exchange(), exchange(error="HTTP 503", event_ms=[])], label="x", window_s=1.0)
    assert (found.num_errors, found.goodput_share, found.goodput_per_s) == (1, 0.5, 1)
    assert found.e2e_ms.p50 == 95
    assert found.cached_share == 0.25


def test_nothing_recorded_is_said_and_not_averaged() -> None:
    with pytest.raises(ValueError, match="no request"):
        summarise([], label="x")


def test_tokens_are_shared_out_over_the_events() -> None:
    assert tokens_by_time(exchange(), 99.0) == [(1.05, 5 / 3), (1.06, 5 / 3), (1.09, 5 / 3)]


def test_records_survive_the_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    written = [exchange(), exchange(error="a \u2028 \ud800 line", event_ms=[])]
    path.write_text("".join(one.to_json() + "\n" for one in written), encoding="utf-8")
    assert read_exchanges(path) == written
