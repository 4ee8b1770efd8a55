"""Summary tables of the parts' results: the time of each row, its breakdown, and the targets met and missed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from loadtest.gpu.parts import FAILURES, LOG
from loadtest.gpu.verdicts import verdicts
from loadtest.tables import markdown_table, number

PART_COLUMNS = ("part", "seconds", "what came of it")
KERNEL_COLUMNS = ("kernel", "µs", "GB/s", "TFLOP/s", "of ceiling")
ENGINE_COLUMNS = ("work", "step ms", "floor ms", "of floor", "target", "verdict", "compiled", "tokens/s")
SWEEP_COLUMNS = ("kernel", "as it is, µs", "best, µs", "of ceiling", "by")
TRACE_COLUMNS = ("recorded steps", "step ms", "not recorded", "device ms", "host ms", "idle", "trace")
FAMILY_COLUMNS = ("kernels of a step", "ms", "of the step", "launches")
VERDICT_COLUMNS = ("what is wanted", "target", "found", "verdict")
FAILURE_COLUMNS = ("part", "what failed", "why")
LOG_COLUMNS = ("part", "what the engine warned of")
RESIDENCY_COLUMNS = ("more adapters than fit", "value", "ratio", "target", "verdict")
PEER_COLUMNS = ("peer", "step ms")


def summary(found: Mapping[str, Any]) -> str:
    """Return the tables for the results of `loadtest.gpu.parts.run_parts`."""
    parts = found["parts"]
    tables = [
        markdown_table(
            PART_COLUMNS, [[name, number(part["seconds"]), part["error"] or "done"] for name, part in parts.items()]
        )
    ]
    for key, (columns, cells) in TABLES.items():
        rows = [cells(entry) for name, part in parts.items() if name != "peers" for entry in part.get(key, [])]
        if rows:
            tables.append(markdown_table(columns, rows))
    tables += [families_table(trace) for part in parts.values() for trace in part.get("traces", [])]
    failures = [
        [name, entry["what"], entry["why"].partition("\n")[0]]
        for name, part in parts.items()
        for entry in part.get(FAILURES, [])
    ]
    if failures:
        tables.append(markdown_table(FAILURE_COLUMNS, failures))
    warnings = [
        [name, entry["message"].partition("\n")[0]]
        for name, part in parts.items()
        for entry in part.get(LOG, [])
        if entry["level"] != "INFO"
    ]
    if warnings:
        tables.append(markdown_table(LOG_COLUMNS, warnings))
    peers = parts.get("peers", {}).get("figures", [])
    if peers:
        tables.append(markdown_table(PEER_COLUMNS, [[peer["name"], number(peer["step_ms"])] for peer in peers]))
    wanted = [[row.what, row.target, row.found, row.verdict] for row in verdicts(parts)]
    tables.append(markdown_table(VERDICT_COLUMNS, wanted))
    return "\n\n".join(tables)


def line(key: str, entry: Mapping[str, Any]) -> str:
    """Return one entry of a part's results as a line."""
    return " | ".join(TABLES[key][1](entry))


def engine_line(result: Mapping[str, Any]) -> str:
    """Return one engine row as a line, with a breakdown of the host's time."""
    split = ", ".join(f"{part} {number(ms)}" for part, ms in result["ms_by_part"].items())
    return f"{line('results', result)} | host ms: {split}"


def families_table(trace: Mapping[str, Any]) -> str:
    """Return a table of device time by kernel family for the steps of one row; overlapping kernels each count fully."""
    rows = [
        [family["name"], number(family["ms"]), f"{family['share']:.1%}", number(family["launches"])]
        for family in trace["families"]
    ]
    idle_ms = trace["step_ms"] - trace["busy_ms"]
    rows.append(["none: the device idles", number(idle_ms), f"{trace['idle_share']:.1%}", ""])
    return markdown_table((f"{FAMILY_COLUMNS[0]}: {trace['title']}", *FAMILY_COLUMNS[1:]), rows)


def _kernel_cells(figure: Mapping[str, Any]) -> list[str]:
    rates = (number(figure[key]) for key in ("us", "gb_per_s", "tflop_per_s"))
    return [figure["name"], *rates, f"{figure['of_ceiling']:.0%}"]


def _engine_cells(result: Mapping[str, Any]) -> list[str]:
    return [
        result["title"],
        number(result["step_ms"]),
        number(result["floor_ms"]),
        f"{result['of_floor']:.0%}",
        "" if result["target"] is None else f"{result['target']:.0%}",
        result["verdict"],
        str(result["num_compiled"]),
        number(result["tokens_per_s"]),
    ]


def _trace_cells(trace: Mapping[str, Any]) -> list[str]:
    times = [number(trace[key]) for key in ("step_ms", "plain_step_ms", "busy_ms", "host_ms")]
    return [trace["title"], *times, f"{trace['idle_share']:.1%}", trace["file"]]


def _sweep_cells(found: Mapping[str, Any]) -> list[str]:
    return [
        found["name"],
        number(found["usual_us"]),
        number(found["best_us"]),
        f"{found['usual_of_ceiling']:.0%} to {found['best_of_ceiling']:.0%}",
        found["best"],
    ]


def _residency_cells(row: Mapping[str, Any]) -> list[str]:
    return [row["name"], number(row["value"]), number(row["ratio"]), row["target"], row["verdict"]]


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Mapping[str, Any]], list[str]]]] = {
    "figures": (KERNEL_COLUMNS, _kernel_cells),
    "sweeps": (SWEEP_COLUMNS, _sweep_cells),
    "results": (ENGINE_COLUMNS, _engine_cells),
    "traces": (TRACE_COLUMNS, _trace_cells),
    "residency": (RESIDENCY_COLUMNS, _residency_cells),
}
"""Key in the results of a part -> the columns of its table, and the cells of an entry."""
