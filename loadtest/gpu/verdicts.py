"""Targets of the GPU path: each is met, missed, or not measured, depending on the parts that were run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from loadtest.gpu.attention import CONTEXT, ROWS
from loadtest.gpu.engine import BF16_DECODE, CROWDED_DECODE, FP8_DECODE, WORKS_BY_MODEL

ATTENTION, ATTENTION_SHARE = f"decode attention, {ROWS} rows of {CONTEXT}", 0.88
FP8_TIMES = 1.6
IDLE_SHARE = 0.03
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
        _row(f"{FP8_DECODE.title}: tokens/s of bf16", "at least", FP8_TIMES, _fp8_times(results), _times),
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


def _fp8_times(results: Mapping[str, Any]) -> float | None:
    plain, short = (results.get(work.title) for work in (BF16_DECODE, FP8_DECODE))
    return None if plain is None or short is None else short["tokens_per_s"] / plain["tokens_per_s"]


def _host_row(trace: Mapping[str, Any] | None) -> Verdict:
    """Return the row for host time, whose bound is measured too: the device time."""
    what = f"{CROWDED_DECODE.title}: ms of the host"
    if trace is None:
        return Verdict(what=what, target="under the device's", found="", verdict=UNMEASURED)
    return _row(what, "under the device's", trace["busy_ms"], trace["host_ms"], "{:.2f}".format)


def _row(what: str, relation: str, bound: float, found: float | None, show: Callable[[float], str]) -> Verdict:
    if found is None:
        verdict = UNMEASURED
    else:
        verdict = MET if (found >= bound if relation == "at least" else found < bound) else MISSED
    return Verdict(
        what=what, target=f"{relation} {show(bound)}", found="" if found is None else show(found), verdict=verdict
    )


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times"


def _by(parts: Mapping[str, Any], key: str, name: str) -> dict[str, Mapping[str, Any]]:
    return {entry[name]: entry for part in parts.values() for entry in part.get(key, [])}
