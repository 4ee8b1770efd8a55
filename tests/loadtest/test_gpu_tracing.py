"""Traces are read for what the device did: made ones to the microsecond, and one of the profiler's own."""

from __future__ import annotations

import gzip
import json
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loadtest.gpu import tracing
from loadtest.gpu.tracing import NUM_STEPS, SKIPPED_STEPS, Interval, Trace, covered

BASE_NS = 1_700_000_000_000_000_000
NUM_REPLAYS = SKIPPED_STEPS + NUM_STEPS + 1
STEP_US = 100.0
WHOLE_RUN = Interval(BASE_NS, BASE_NS + NUM_REPLAYS * STEP_US * 1000)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there the device's own events are recorded")


def event(name: str, category: str, start_us: float, took_us: float) -> dict[str, object]:
    return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": took_us, "pid": 0, "tid": 7}


def step_at(start_us: float) -> list[dict[str, object]]:
    """Two kernels side by side, a copy, and nothing in the last 15 of 100 microseconds."""
    return [
        event("cudaGraphLaunch", "cuda_runtime", start_us, 3),
        event("cudaEventSynchronize", "cuda_runtime", start_us + 3, 90),
        event("nvjet_tst_64x8_64x16_4x1_v_bz_TNN", "kernel", start_us, 50),
        event("paged_attention_kernel", "kernel", start_us + 40, 40),
        event("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", start_us + 80, 5),
        {"ph": "i", "cat": "kernel", "name": "an instant", "ts": start_us + 95, "s": "t"},
    ]


def written(path: Path, events: list[dict[str, object]]) -> Trace:
    with gzip.open(path, "wt", encoding="utf-8") as file:
        json.dump({"traceEvents": events, "baseTimeNanoseconds": BASE_NS}, file)
    return tracing.read(path)


def test_a_step_is_what_the_device_does_from_one_replay_to_the_next(tmp_path: Path) -> None:
    replays = [line for number in range(NUM_REPLAYS) for line in step_at(number * STEP_US)]
    # Before and after the steps that are looked at anything may happen.
    prompts = event("prompts", "kernel", -500.0, SKIPPED_STEPS * STEP_US + 499)
    found = tracing.steps(written(tmp_path / "t.json.gz", [*replays, prompts]), WHOLE_RUN)
    assert found.num_steps == NUM_STEPS
    assert found.step_ms == pytest.approx(0.100)
    assert found.busy_ms == pytest.approx(0.085)
    assert found.idle_share == pytest.approx(0.15)
    assert [(one.name, round(one.ms, 6), round(one.share, 6), one.launches) for one in found.families] == [
        (tracing.PRODUCTS, 0.050, 0.50, 1.0),
        ("paged_attention_kernel", 0.040, 0.40, 1.0),
        ("Memcpy DtoH", 0.005, 0.05, 1.0),
    ]


def test_a_run_is_looked_at_by_itself(tmp_path: Path) -> None:
    shift_us = 1e6
    slow = [line for number in range(NUM_REPLAYS) for line in step_at(shift_us + 2 * number * STEP_US)]
    quick = [line for number in range(NUM_REPLAYS) for line in step_at(number * STEP_US)]
    trace = written(tmp_path / "t.json.gz", slow + quick)
    second = Interval(BASE_NS + shift_us * 1000, BASE_NS + 2 * shift_us * 1000)
    assert tracing.steps(trace, WHOLE_RUN).idle_share == pytest.approx(0.15)
    assert tracing.steps(trace, second).idle_share == pytest.approx(0.575)


def test_a_trace_that_tells_nothing_says_what_it_has(tmp_path: Path) -> None:
    launches = [event("hipGraphLaunch", "cuda_runtime", number * STEP_US, 3) for number in range(NUM_REPLAYS)]
    with pytest.raises(ValueError, match="nothing of the device in these steps, of 0 events"):
        tracing.steps(written(tmp_path / "t.json.gz", launches), WHOLE_RUN)
    with pytest.raises(ValueError, match=f"{NUM_REPLAYS - 1} replays of this run, of {NUM_REPLAYS - 1} in all"):
        tracing.steps(written(tmp_path / "t.json.gz", launches[1:]), WHOLE_RUN)


def test_the_smallest_families_are_told_as_one(tmp_path: Path) -> None:
    replays = [
        line
        for number in range(NUM_REPLAYS)
        for line in [
            event("cudaGraphLaunch", "cuda_runtime", number * STEP_US, 1),
            *(event(f"kernel_{kind:02}", "kernel", number * STEP_US + 5 * kind, 4) for kind in range(15)),
        ]
    ]
    families = tracing.steps(written(tmp_path / "t.json.gz", replays), WHOLE_RUN).families
    assert len(families) == tracing.NUM_FAMILIES + 1
    assert families[-1].name == tracing.OTHERS
    assert families[-1].launches == 3
    assert families[-1].ms == pytest.approx(0.012)


@pytest.mark.parametrize(
    ("name", "category", "expected"),
    [
        ("streamed_linear_kernel", "kernel", "streamed_linear_kernel"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop>(Params)", "kernel", tracing.PRODUCTS),
        ("nvjet_sm90_tst_128x64", "kernel", tracing.PRODUCTS),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>(int)", "kernel", tracing.PRODUCTS),
        ("void at::native::vectorized_elementwise_kernel<4, F>(int)", "kernel", "vectorized_elementwise_kernel"),
        ("void at::native::(anonymous namespace)::indexing<long>(long)", "kernel", "indexing"),
        ("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy", "Memcpy HtoD"),
        ("Memset (Device)", "gpu_memset", "Memset"),
    ],
)
def test_kernels_are_told_by_kind(name: str, category: str, expected: str) -> None:
    assert tracing.family(name, category) == expected


seconds = st.integers(0, 30)
stretches = st.builds(Interval, seconds, seconds)


@given(st.lists(stretches), stretches)
def test_times_that_overlap_are_counted_once(intervals: list[Interval], within: Interval) -> None:
    """Against a row of seconds that are ticked off one by one."""
    ticked = {at for start, end in intervals for at in range(int(start), int(end))}
    inside = set(range(int(within.start), int(within.end)))
    assert covered(intervals, within) == len(ticked & inside)
    gaps = [Interval(at, at + 1) for at in inside - ticked]
    assert covered([*intervals, *gaps], within) == len(inside)


@no_gpu
def test_the_profilers_own_trace_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU operators stand in for kernels, and an annotation for a replay."""
    monkeypatch.setattr(tracing, "DEVICE_CATEGORIES", frozenset({"cpu_op"}))

    def run(size: int, kind: str) -> None:
        x = torch.ones(size, size)
        for _ in range(NUM_REPLAYS):
            with torch.profiler.record_function(f"stand-in for a {tracing.LAUNCH}"):
                getattr(x, kind)()

    path = tmp_path / "t.json.gz"
    spans = tracing.record(path, [partial(run, 64, "exp"), partial(run, 128, "cos")])
    trace = tracing.read(path)
    for span, own in zip(spans, ("exp", "cos"), strict=True):
        found = tracing.steps(trace, span)
        assert [(family.name, family.launches) for family in found.families] == [(f"aten::{own}", 1.0)]
        assert 0 < found.busy_ms <= found.step_ms
        assert 0 <= found.idle_share < 1
