"""Plots of load tests: TTFT and gaps, throughput over time, overload, routing. Matplotlib, to files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from loadtest.measure import Exchange, tokens_by_time

Runs = Mapping[str, Sequence[Exchange]]
"""Label of a run -> its exchanges."""


def cdf_points(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the sorted values and, for each, the share of values at or below it."""
    ordered = sorted(values)
    return ordered, [(place + 1) / len(ordered) for place in range(len(ordered))]


def tokens_in_bins(exchanges: Sequence[Exchange], bin_s: float = 1.0) -> list[float]:
    """Return output tokens per second in each time bin since the first request was sent."""
    if not exchanges:
        return []
    origin_s = min(exchange.started_s for exchange in exchanges)
    points = [point for exchange in exchanges for point in tokens_by_time(exchange, origin_s)]
    bins = [0.0] * max((ceil((at_s + 1e-9) / bin_s) for at_s, _ in points), default=0)
    for at_s, tokens in points:
        bins[int(at_s // bin_s)] += tokens / bin_s
    return bins


def draw_all(runs: Runs, folder: Path) -> list[Path]:
    """Draw all plots of the runs and return the files."""
    return [
        _draw_cdf(
            {label: [e.ttft_ms for e in found if e.ttft_ms is not None] for label, found in runs.items()},
            "time to first text, ms",
            folder / "ttft.png",
        ),
        _draw_cdf(
            {label: [gap for e in found for gap in e.gaps_ms] for label, found in runs.items()},
            "gap between text events, ms",
            folder / "itl.png",
        ),
        _draw_throughput(runs, folder / "throughput.png"),
    ]


def draw_overload(phases: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Plot results of `loadtest.overload`: goodput, complete answers and server memory by arrival rate."""
    _figure, (rates, memory) = plt.subplots(2, 1, figsize=(6, 6), sharex=True, height_ratios=(2, 1))
    multiples = [phase["multiple"] for phase in phases]
    rates.plot(multiples, [phase["goodput_per_s"] for phase in phases], marker="o", label="goodput")
    rates.plot(multiples, [phase["answered_per_s"] for phase in phases], marker=".", label="whole answers")
    rates.set_ylim(bottom=0)
    rates.set_ylabel("answers a second")
    rates.grid(visible=True, alpha=0.3)
    rates.legend()
    held = [max(phase["memory_mb"], default=0.0) for phase in phases]
    memory.plot(multiples, held, marker="o")
    memory.set_ylim(bottom=0, top=1.2 * max([1.0, *held]))
    return _finish(memory, "arrivals, in multiples of the capacity", "server's memory, MB", path)


def draw_routing(runs: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Plot results of `loadtest.routing_simulation`: bars for each policy in each scene."""
    scenes = [f"{run['replicas']} replicas\n{run['rate']:g} req/s each" for run in runs]
    panels: dict[str, Callable[[Mapping[str, float]], float]] = {
        "TTFT p50, ms": lambda row: row["ttft_p50_ms"],
        "TTFT p99, ms": lambda row: row["ttft_p99_ms"],
        "prompt tokens from the cache, %": lambda row: 100 * row["prefix_hit_rate"],
        "adapter loads per 100 requests": lambda row: 100 * row["adapter_loads"] / row["requests"],
    }
    figure, axes = plt.subplots(2, 2, figsize=(12, 7))
    for panel, (label, value) in zip(axes.flat, panels.items(), strict=True):
        for place, policy in enumerate(runs[0]["policies"]):
            heights = [value(run["policies"][policy]) for run in runs]
            panel.bar([scene + 0.2 * (place - 1.5) for scene in range(len(runs))], heights, 0.2, label=policy)
        panel.set_xticks(range(len(scenes)), scenes, fontsize=7)
        panel.set_title(label, fontsize=10)
        panel.grid(visible=True, axis="y", alpha=0.3)
        if "TTFT" in label:
            panel.set_yscale("log")
    axes.flat[0].legend(fontsize=8)
    figure.tight_layout()
    plt.savefig(path, dpi=100)
    plt.close("all")
    return path


def _draw_cdf(values_by_label: Mapping[str, Sequence[float]], quantity: str, path: Path) -> Path:
    _figure, axes = plt.subplots(figsize=(6, 4))
    for label, values in values_by_label.items():
        if values:
            xs, ys = cdf_points(values)
            axes.step(xs, ys, where="post", label=label)
            axes.set_xscale("log")
    axes.set_ylim(0, 1)
    return _finish(axes, quantity, "share of all", path)


def _draw_throughput(runs: Runs, path: Path) -> Path:
    _figure, axes = plt.subplots(figsize=(6, 4))
    for label, exchanges in runs.items():
        heights = tokens_in_bins(exchanges)
        axes.plot([place + 0.5 for place in range(len(heights))], heights, label=label)
    axes.set_ylim(bottom=0)
    return _finish(axes, "seconds since the start", "output tokens a second", path)


def _finish(axes: Axes, x_label: str, y_label: str, path: Path) -> Path:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.grid(visible=True, alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    plt.savefig(path, dpi=120, bbox_inches="tight")
    plt.close("all")
    return path
