"""Everything that needs a GPU, in one call: build, check, measure, and write what was found as JSON.

    python -m loadtest.gpu --out loadtest/results/h200.json
    python -m loadtest.gpu --skip-checks --models qwen3-0.6b

Prints a table of kernels (what each moves and computes a second, against the device's measured ceilings) and one of
whole engine steps against their floor: the longer of bytes over copy bandwidth and operations over matrix rate.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from loadtest.gpu import engine, kernels
from loadtest.gpu.timing import measure_ceilings
from loadtest.tables import markdown_table, number

CHECKS = ("tests/kernels/gpu", "tests/engine/gpu", "tests/parity/test_triton_kernels.py")
CHECK_TIMEOUT_S = 240
KERNEL_COLUMNS = ("kernel", "µs", "GB/s", "TFLOP/s", "of ceiling")
ENGINE_COLUMNS = ("work", "step ms", "floor ms", "of floor", "target", "tokens/s")


def run_checks() -> dict[str, object]:
    """Run the tests of the GPU path in a process of their own; return whether they passed, and their last lines."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *CHECKS]
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"passed": False, "tail": f"not done after {CHECK_TIMEOUT_S} s"}
    return {"passed": run.returncode == 0, "tail": run.stdout[-3000:]}


def facts() -> dict[str, object]:
    """Return what the figures were measured on and with."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def measure_all(models: Sequence[str], found: dict[str, Any]) -> None:
    """Fill `found` part by part: what fails is told there, and the rest goes on."""
    ceilings = measure_ceilings()
    found["ceilings"] = asdict(ceilings)
    print(f"copy {ceilings.bytes_per_s / 1e12:.2f} TB/s, products {ceilings.flop_per_s / 1e12:.0f} TFLOP/s\n")
    try:
        figures = kernels.measure(ceilings)
        found["kernels"] = [asdict(figure) for figure in figures]
        rows = [
            [f.name, number(f.us), number(f.gb_per_s), number(f.tflop_per_s), f"{f.of_ceiling:.0%}"] for f in figures
        ]
        print(markdown_table(KERNEL_COLUMNS, rows), "\n", flush=True)
    except Exception:  # noqa: BLE001 - one part must not cost the others their turn on the device
        found["kernels_error"] = traceback.format_exc()
        print(found["kernels_error"])
    for model in models:
        try:
            results = engine.measure(model, ceilings)
        except Exception:  # noqa: BLE001 - as above
            found.setdefault("engine_errors", {})[model] = traceback.format_exc()
            print(found["engine_errors"][model])
            continue
        found.setdefault("engine", []).extend(asdict(result) for result in results)
        table = [
            [
                result.title,
                number(result.step_ms),
                number(result.floor_ms),
                f"{result.of_floor:.0%}",
                "" if result.target is None else f"{result.target:.0%}",
                number(result.tokens_per_s),
            ]
            for result in results
        ]
        print(markdown_table(ENGINE_COLUMNS, table), "\n", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, measure, print and write; return 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.gpu", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("loadtest/results/gpu.json"))
    parser.add_argument("--models", default=",".join(engine.WORKS_BY_MODEL), help="by commas")
    parser.add_argument("--skip-checks", action="store_true")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("loadtest.gpu: there is no GPU here")
    started_s = time.monotonic()
    found: dict[str, Any] = facts()
    try:
        if not options.skip_checks:
            found["checks"] = run_checks()
            print(found["checks"]["tail"], flush=True)
        measure_all(options.models.split(","), found)
    finally:
        found["seconds"] = time.monotonic() - started_s
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(found, indent=2), encoding="utf-8")
        print(f"{found['seconds']:.0f} s; written to {options.out}")
    has_failed = not found.get("checks", {"passed": True})["passed"]
    return int(has_failed or "kernels_error" in found or "engine_errors" in found)


if __name__ == "__main__":
    sys.exit(main())
