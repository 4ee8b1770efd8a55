"""Trace decode steps on the device, kernel by kernel, and measure how long it idles.

torch's profiler records whole answers. The trace is kept, and analyzed for the steps in which all rows decode: each
replays one CUDA graph while the host prepares the next step. A step lasts from one graph launch on the host to the
next. Profiling delays kernel starts a little, so the measured idle time is an upper bound.
"""

from __future__ import annotations

import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

DEVICE_CATEGORIES = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
LAUNCH = "GraphLaunch"
"""Part of the name of the host call that launches a graph, in CUDA and HIP."""
SKIPPED_STEPS, NUM_STEPS = 8, 32
"""Graph replays skipped and then analyzed: the first ones still wait for remaining prefill work."""
NUM_FAMILIES = 12
PRODUCTS, OTHERS = "the library's products", "all others"
_PRODUCT = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma", re.IGNORECASE)


class Interval(NamedTuple):
    """The half-open interval [start, end); empty if they are equal."""

    start: float
    end: float


class Event(NamedTuple):
    """One kernel, copy or memset; microseconds on the trace's clock."""

    name: str
    category: str
    when: Interval


class Trace(NamedTuple):
    """Device events, and the times at which the host launched graph replays, sorted.

    Attributes:
        base_ns: origin of the trace's clock, on the clock of `time.time_ns`.
    """

    events: list[Event]
    launches_us: list[float]
    base_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Kernels of one kind in a mean step; overlapping kernels each count fully."""

    name: str
    ms: float
    share: float
    launches: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Device activity in the steps of one row.

    Attributes:
        step_ms: mean step time while profiled.
        busy_ms: the part of it in which a kernel or a copy ran: device time.
        idle_share: the share of it in which none ran.
        families: device time by kernel family, largest first.
    """

    num_steps: int
    step_ms: float
    busy_ms: float
    idle_share: float
    families: list[Family]


def record(path: Path, runs: Sequence[Callable[[], object]]) -> list[Interval]:
    """Run all under the profiler and write the trace; return when each ran, in ns of `time.time_ns`.

    Everything is recorded at once: a second recording in the same process may capture nothing on a GPU.
    """
    has_gpu = torch.cuda.is_available()
    spans = []
    # No host operators on a GPU: recording them would slow down the host.
    with profile(activities=[ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU]) as profiler:
        for run in runs:
            started_ns = time.time_ns()
            run()
            if has_gpu:
                torch.cuda.synchronize()
            spans.append(Interval(started_ns, time.time_ns()))
    profiler.export_chrome_trace(str(path))
    return spans


def read(path: Path) -> Trace:
    """Read a trace written by `record`."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        whole = json.load(file, strict=False)
    events, launches_us = [], []
    for event in whole["traceEvents"]:
        if event.get("ph") != "X":
            continue
        name, category, start_us = str(event["name"]), str(event.get("cat", "")), float(event["ts"])
        if category in DEVICE_CATEGORIES:
            events.append(Event(name, category, Interval(start_us, start_us + float(event.get("dur", 0)))))
        elif LAUNCH in name:
            launches_us.append(start_us)
    return Trace(events, sorted(launches_us), int(whole.get("baseTimeNanoseconds", 0)))


def steps(trace: Trace, span_ns: Interval) -> Steps:
    """Return the device activity in the steps of a run.

    Raises:
        ValueError: there are too few steps, or the trace has no device events in them.
    """
    start_us, end_us = ((ns - trace.base_ns) / 1000 for ns in span_ns)
    launches_us = [at for at in trace.launches_us if start_us <= at < end_us]
    if len(launches_us) <= SKIPPED_STEPS + NUM_STEPS:
        raise ValueError(f"the trace has {len(launches_us)} replays of this run, of {len(trace.launches_us)} in all")
    window = Interval(launches_us[SKIPPED_STEPS], launches_us[SKIPPED_STEPS + NUM_STEPS])
    busy_us = covered((event.when for event in trace.events), window)
    if not busy_us:
        raise ValueError(f"the trace has nothing of the device in these steps, of {len(trace.events)} events in all")
    whole_us = window.end - window.start
    return Steps(
        num_steps=NUM_STEPS,
        step_ms=whole_us / NUM_STEPS / 1000,
        busy_ms=busy_us / NUM_STEPS / 1000,
        idle_share=1 - busy_us / whole_us,
        families=_families(trace, window),
    )


def covered(intervals: Iterable[Interval], within: Interval) -> float:
    """Return the length of `within` that is covered by any of the intervals, which may overlap."""
    total, reached = 0.0, within.start
    for start, end in sorted(intervals):
        upto = min(end, within.end)
        total += max(0.0, upto - max(start, reached))
        reached = max(reached, upto)
    return total


def family(name: str, category: str) -> str:
    """Return the family of a kernel or copy, from its name."""
    if category != "kernel":
        return name.partition(" (")[0]
    if _PRODUCT.search(name):
        return PRODUCTS
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", plain, maxsplit=1)[0].rpartition("::")[2] or name


def _families(trace: Trace, window: Interval) -> list[Family]:
    us_by_name: dict[str, list[float]] = defaultdict(list)
    for name, category, (start_us, end_us) in trace.events:
        if window.start <= start_us < window.end:
            us_by_name[family(name, category)].append(end_us - start_us)
    most_first = sorted(us_by_name.items(), key=lambda item: -sum(item[1]))
    kept, rest = most_first[:NUM_FAMILIES], most_first[NUM_FAMILIES:]
    if rest:
        kept.append((OTHERS, [us for _, all_us in rest for us in all_us]))
    step_us = (window.end - window.start) / NUM_STEPS
    return [
        Family(
            name=name,
            ms=sum(all_us) / NUM_STEPS / 1000,
            share=sum(all_us) / NUM_STEPS / step_us,
            launches=len(all_us) / NUM_STEPS,
        )
        for name, all_us in kept
    ]
