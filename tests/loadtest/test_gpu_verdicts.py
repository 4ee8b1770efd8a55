"""Every row that is wanted is told, whatever was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from loadtest.gpu.engine import BF16_DECODE, CROWDED_DECODE, FP8_DECODE, SMALL_DECODE
from loadtest.gpu.verdicts import ATTENTION, MET, MISSED, UNMEASURED, Verdict, verdicts

ONE_ADAPTER = replace(BF16_DECODE, num_adapters=1, target=1 / 1.06, is_traced=False)


def found_of(parts: dict[str, Any], beginning: str) -> Verdict:
    (row,) = [row for row in verdicts(parts) if row.what.startswith(beginning)]
    return row


def test_what_was_not_measured_is_told_as_such() -> None:
    rows = verdicts({"facts": {"error": "stopped after 9 s"}})
    # Eight rows of the engine have a target of their own, two of residency too, and seven compare several figures.
    assert len(rows) == 17
    assert len({row.what for row in rows}) == 17
    assert {row.verdict for row in rows} == {UNMEASURED}
    assert {row.found for row in rows} == {""}


def test_a_share_of_the_floor_is_held_against_its_target() -> None:
    result = {"title": SMALL_DECODE.title, "of_floor": 0.6, "target": 0.6, "tokens_per_s": 1.0}
    row = found_of({"a": {"results": [result]}}, SMALL_DECODE.title)
    assert row == Verdict(
        what=f"{SMALL_DECODE.title}: of the floor", target="at least 60.0%", found="60.0%", verdict=MET
    )
    short = {"a": {"results": [result | {"of_floor": 0.599}]}}
    assert found_of(short, SMALL_DECODE.title).verdict == MISSED


def test_adapters_without_the_row_to_hold_them_against_are_not_judged() -> None:
    result = {"title": ONE_ADAPTER.title, "of_floor": 0.95, "target": 1 / 1.06, "tokens_per_s": 1.0}
    assert found_of({"a": {"results": [result]}}, f"{ONE_ADAPTER.title}: of the row").verdict == MET
    alone = {"a": {"results": [result | {"target": None}]}}
    assert found_of(alone, f"{ONE_ADAPTER.title}: of the row").verdict == UNMEASURED


def test_8_bits_are_held_against_16_only_where_both_were_measured() -> None:
    plain = {"title": BF16_DECODE.title, "of_floor": 0.9, "target": 0.8, "tokens_per_s": 1000.0}
    short = {"title": FP8_DECODE.title, "of_floor": 0.9, "target": None, "tokens_per_s": 1590.0}
    beginning = f"{FP8_DECODE.title}: tokens/s"
    both = found_of({"a": {"results": [plain]}, "b": {"results": [short]}}, beginning)
    assert (both.target, both.found, both.verdict) == ("at least 1.60 times", "1.59 times", MISSED)
    better = short | {"tokens_per_s": 1600.0}
    assert found_of({"a": {"results": [plain]}, "b": {"results": [better]}}, beginning).verdict == MET
    for known in (plain, short):
        assert found_of({"a": {"results": [known]}}, beginning).verdict == UNMEASURED


def test_tokens_over_adapters_are_held_against_those_of_none() -> None:
    plain = {"title": BF16_DECODE.title, "of_floor": 0.9, "target": 0.8, "tokens_per_s": 1000.0}
    rate_by_num = {1: 940.0, 16: 899.0, 64: 870.0}
    over = [
        {"title": replace(BF16_DECODE, num_adapters=num).title, "target": None, "tokens_per_s": rate}
        for num, rate in rate_by_num.items()
    ]
    beginnings = [f"{one['title']}: tokens/s of none" for one in over]
    found = [found_of({"a": {"results": [plain, *over]}}, beginning) for beginning in beginnings]
    assert [(row.target, row.found, row.verdict) for row in found] == [
        ("at least 94.0%", "94.0%", MET),
        ("at least 90.0%", "89.9%", MISSED),
        ("at least 87.0%", "87.0%", MET),
    ]
    assert {found_of({"a": {"results": over}}, beginning).verdict for beginning in beginnings} == {UNMEASURED}


def test_adapters_that_do_not_fit_are_held_against_those_that_do() -> None:
    names = ("all by Zipf: tokens/s, of one adapter", "twice the slots: TTFT p50 ms, of as many as slots")
    parts = {"residency": {"residency": [{"name": name, "ratio": 1.99} for name in names]}}
    rows = [found_of(parts, f"more adapters than fit, {name}") for name in names]
    assert [(row.target, row.found, row.verdict) for row in rows] == [
        ("at least 0.85 times", "1.99 times", MET),
        ("under 2.00 times", "1.99 times", MET),
    ]


def test_attention_is_held_against_a_copy() -> None:
    figures = [{"name": "torch's " + ATTENTION, "of_ceiling": 0.95}, {"name": ATTENTION, "of_ceiling": 0.87}]
    row = found_of({"attention": {"figures": figures}, "peers": {"figures": [{"name": "x"}]}}, ATTENTION)
    assert (row.target, row.found, row.verdict) == ("at least 88.0%", "87.0%", MISSED)


def test_what_traces_tell_is_held_against_its_bounds() -> None:
    traces = [
        {"title": BF16_DECODE.title, "idle_share": 0.029, "busy_ms": 6.0, "host_ms": 1.0},
        {"title": CROWDED_DECODE.title, "idle_share": 0.2, "busy_ms": 2.0, "host_ms": 2.5},
    ]
    parts = {"a": {"traces": traces}}
    idle, host = found_of(parts, f"{BF16_DECODE.title}: the device"), found_of(parts, CROWDED_DECODE.title)
    assert (idle.target, idle.found, idle.verdict) == ("under 3.0%", "2.9%", MET)
    assert (host.target, host.found, host.verdict) == ("under the device's 2.00", "2.50", MISSED)
