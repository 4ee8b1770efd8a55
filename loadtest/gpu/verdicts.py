"""Targets of the GPU path: each is met, missed, or not measured, depending on the parts that were run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from loadtest.adapter_residency import COMPARISONS, is_met
from loadtest.gpu.attention import CONTEXT, ROWS
from loadtest.gpu.engine import BF16_DECODE, CROWDED_DECODE, FP8_DECODE, WORKS_BY_MODEL, Work

ATTENTION, ATTENTION_SHARE = f"decode attention, {ROWS} rows of {CONTEXT}", 0.88
FP8_TIMES = 1.6
IDLE_SHARE = 0.03
RATE_BY_NUM_ADAPTERS = {1: 0.94, 16: 0.90, 64: 0.87}
"""Number of adapters -> least tokens/s of `BF16_DECODE` over so many, relative to none."""
MET, MISSED, UNMEASURED = "met", "MISSED", "not measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """One row of the table of targets, formatted."""

    what: str
    target: str
    found: str
    verdict: str


def verdicts(parts: Mapping[str, Any]) -> list[Verdict]:
    """Return all rows, from the parts' results in `loadtest.gpu.parts.run_parts`."""
    results = _by(parts, "results", "title")
    traces = _by(parts, "traces", "title")
    attention = _by(parts, "figures", "name").get(ATTENTION, {}).get("of_ceiling")
    idle = traces.get(BF16_DECODE.title, {}).get("idle_share")
    return [
        *_of_floors(results),
        _row(f"{ATTENTION}: of what a copy reaches", "at least", ATTENTION_SHARE, attention, _percent),
        *_of_none(results),
        *_of_residency(_by(parts, "residency", "name")),
        _row(f"{FP8_DECODE.title}: tokens/s of bf16", "at least", FP8_TIMES, _rate(results, FP8_DECODE), _times),
        _row(f"{BF16_DECODE.title}: the device idles", "under", IDLE_SHARE, idle, _percent),
        _host_row(traces.get(CROWDED_DECODE.title)),
    ]


def _of_floors(results: Mapping[str, Any]) -> Iterator[Verdict]:
    for works in WORKS_BY_MODEL.values():
        for work in works:
            if work.target is not None:
                result = results.get(work.title, {})
                # A row with adapters is compared to the same row without, and has no target if that one failed.
                found = None if result.get("target") is None else result["of_floor"]
                base = "the row without" if work.num_adapters else "the floor"
                yield _row(f"{work.title}: of {base}", "at least", work.target, found, _percent)


def _of_none(results: Mapping[str, Any]) -> Iterator[Verdict]:
    for num_adapters, share in RATE_BY_NUM_ADAPTERS.items():
        work = replace(BF16_DECODE, num_adapters=num_adapters)
        yield _row(f"{work.title}: tokens/s of none", "at least", share, _rate(results, work), _percent)


def _of_residency(rows: Mapping[str, Any]) -> Iterator[Verdict]:
    for wanted in COMPARISONS:
        if wanted.bound is not None:
            ratio = rows.get(wanted.name, {}).get("ratio")
            yield _row(f"more adapters than fit, {wanted.name}", wanted.relation, wanted.bound, ratio, _times)


def _rate(results: Mapping[str, Any], work: Work) -> float | None:
    """Return the tokens/s of a row relative to `BF16_DECODE`, if both were measured."""
    plain, found = (results.get(one.title) for one in (BF16_DECODE, work))
    return None if plain is None or found is None else found["tokens_per_s"] / plain["tokens_per_s"]


def _host_row(trace: Mapping[str, Any] | None) -> Verdict:
    """Return the row for host time, whose bound is measured too: the device time."""
    what = f"{CROWDED_DECODE.title}: ms of the host"
    if trace is None:
        return Verdict(what=what, target="under the device's", found="", verdict=UNMEASURED)
    return _row(what, "under the device's", trace["busy_ms"], trace["host_ms"], "{:.2f}".format)


def _row(what: str, relation: str, bound: float, found: float | None, show: Callable[[float], str]) -> Verdict:
    target = f"{relation} {show(bound)}"
    if found is None:
        return Verdict(what=what, target=target, found="", verdict=UNMEASURED)
    verdict = MET if is_met(found, relation, bound) else MISSED
    return Verdict(what=what, target=target, found=show(found), verdict=verdict)


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times"


def _by(parts: Mapping[str, Any], key: str, name: str) -> dict[str, Mapping[str, Any]]:
    return {entry[name]: entry for part in parts.values() for entry in part.get(key, [])}
