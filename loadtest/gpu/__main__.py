"""Run all checks and measurements that need a GPU, part by part, and write the results as JSON.

    python -m loadtest.gpu --out loadtest/results/h200.json               # the default parts, in at most eight minutes
    python -m loadtest.gpu --only tokens,kernels                          # some of the parts that --help lists

Every part runs in its own process with its own time limit. The file is rewritten after each part; the summary is
printed last. Traces are written next to the file.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import torch

from engine.gpu.trial import APART, IN_TURN, ONE_STREAM, SWITCHES, Switch
from kernels.triton_cache import compile_ahead
from loadtest.gpu import (
    attention,
    bench,
    engine,
    experts,
    kernels,
    peers,
    residency,
    states,
    summary,
    sweep,
    tiers,
    tracing,
)
from loadtest.gpu.parts import Notes, Part, run_parts, this_command
from loadtest.gpu.sizes import GPT_OSS, LLAMA, QWEN_3_MOE
from loadtest.gpu.state_launches import GRANITE_4, QWEN_3_5
from loadtest.gpu.timing import GpuTimer, measure_ceilings
from loadtest.gpu.verdicts import verdicts

DEVICE = torch.device("cuda")
BUDGET_S = 480
TOKEN_TESTS = ("tests/parity/test_triton_kernels.py",)
OTHER_TOKEN_TESTS = (
    "tests/parity/test_gpu_bfloat16.py",
    "tests/parity/test_windows.py::test_so_it_is_by_the_kernels_of_a_gpu",
    "tests/parity/test_mxfp4.py::test_a_gpu_gives_the_tokens_of_the_numbers",
    "tests/parity/test_expert_adapters.py::test_by_the_gpu_s_kernels_their_tokens_are_those_of_the_cpu",
    "tests/parity/test_pooling.py::test_the_gpus_kernels_give_the_same",
    "tests/parity/test_fallback.py::test_the_kernels_of_a_gpu_attend_for_it_and_add_its_adapters",
    "tests/parity/test_fallback.py::test_a_gpu_rounds_what_divides_into_groups_and_leaves_the_rest",
    "tests/parity/test_states.py::test_the_kernels_of_a_gpu_keep_the_states_of_rows_and_attend",
    "tests/parity/test_kept_states.py::test_the_operators_of_a_gpu_copy_states_too",
    "tests/parity/test_tiers.py::test_what_a_gpu_gave_to_the_host_is_what_was_computed",
)
KERNEL_TESTS = ("tests/kernels/gpu", "tests/engine/gpu", "tests/engine/tiers")
SERVER_TESTS = ("tests/e2e/test_gpu.py",)
PYTEST_OPTIONS = ("-v", "-p", "no:cacheprovider", "--maxfail=20", "--durations=5")
TAIL_CHARACTERS = 8000
SWEEPS_AT_ONCE = 4
"""Sweeps compiled together before they are timed: compiling all first would delay the first timing by a minute."""

LIMIT_S_BY_USUAL_ENGINE = {"llama-3.1-8b": 210, "llama-3.1-8b-fp8_quantization-fp8_kv": 50, "qwen3-0.6b": 60}
"""The engine groups that run by default, in order -> their limits in seconds."""
OTHER_LIMIT_S = 150
BASE_MODELS = ("llama-3.1-8b", "qwen3-0.6b")


def parts() -> list[Part]:
    """Return all parts, those for the rows with targets first, so that these get their full time limits."""
    works_by_name = engine.groups()

    def engine_part(name: str) -> Part:
        return Part(
            name=name,
            limit_s=LIMIT_S_BY_USUAL_ENGINE.get(name, OTHER_LIMIT_S),
            run=partial(measure_engine, works=works_by_name[name]),
            is_usual=name in LIMIT_S_BY_USUAL_ENGINE,
        )

    def bench_part(name: str, make: Callable[..., Iterable[bench.Bench]], limit_s: float = 60) -> Part:
        return Part(name=name, limit_s=limit_s, run=partial(measure_benches, make=make), is_usual=False)

    def part_without(name: str, switch: Switch, works: Sequence[engine.Work]) -> Part:
        run = partial(measure_without, works=works, switch=switch)
        return Part(name=f"{name}-{switch.name}", limit_s=OTHER_LIMIT_S, run=run, is_usual=False)

    plain = {name: [work for work in works_by_name[name] if not work.num_adapters][:3] for name in BASE_MODELS}
    single = {name: [work for work in works if work.batch == 1] for name, works in plain.items()}
    with_adapters = [work for work in works_by_name[BASE_MODELS[0]] if work.num_adapters]

    tokens = partial(run_tests, paths=TOKEN_TESTS, num_processes=4)
    other_tokens = partial(run_tests, paths=OTHER_TOKEN_TESTS, num_processes=4)
    tests = partial(run_tests, paths=KERNEL_TESTS, num_processes=os.cpu_count() or 1)
    return [
        Part(name="facts", limit_s=20, run=tell_facts),
        *map(engine_part, LIMIT_S_BY_USUAL_ENGINE),
        Part(name="attention", limit_s=50, run=measure_attention),
        Part(name="tokens", limit_s=240, run=tokens),
        Part(name="residency", limit_s=75, run=partial(measure_residency, crowd=residency.Crowd())),
        Part(name="peers", limit_s=120, run=measure_peers),
        bench_part("kernels", partial(kernels.benches, LLAMA), limit_s=90),
        bench_part("attention-forms", attention.forms),
        bench_part("experts", partial(experts.benches, QWEN_3_MOE)),
        bench_part("experts-gpt-oss", partial(experts.benches, GPT_OSS)),
        bench_part("states", partial(states.benches, QWEN_3_5, GRANITE_4)),
        Part(
            name="residency-in-host-memory",
            limit_s=120,
            run=partial(measure_residency, crowd=residency.ALL_IN_HOST_MEMORY, suffix=", all in host memory"),
            is_usual=False,
        ),
        Part(name="tiers", limit_s=60, run=measure_tiers, is_usual=False),
        Part(name="sweep", limit_s=240, run=measure_sweeps, is_usual=False),
        *(part_without(name, IN_TURN, works) for name, works in plain.items()),
        *(part_without(name, APART, works) for name, works in single.items()),
        part_without(BASE_MODELS[0], ONE_STREAM, with_adapters),
        Part(name="tests", limit_s=240, run=tests, is_usual=False),
        Part(name="other-tokens", limit_s=180, run=other_tokens, is_usual=False),
        Part(name="server", limit_s=120, run=partial(run_tests, paths=SERVER_TESTS, num_processes=0), is_usual=False),
        *(engine_part(name) for name in works_by_name if name not in LIMIT_S_BY_USUAL_ENGINE),
    ]


def tell_facts(notes: Notes) -> None:
    """Record the device, the versions, and the device's measured ceilings."""
    import triton

    properties = torch.cuda.get_device_properties(0)
    notes.tell("device", properties.name)
    notes.tell("multiprocessors", properties.multi_processor_count)
    notes.tell("memory_bytes", properties.total_memory)
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": sys.version.split()[0]}
    has_transformers = find_spec("transformers") is not None
    notes.tell("versions", versions | {"transformers": version("transformers") if has_transformers else None})
    ceilings = measure_ceilings()
    notes.tell("ceilings", asdict(ceilings))
    rates = f"{ceilings.flop_per_s / 1e12:.0f} TFLOP/s in bfloat16, {(ceilings.fp8_flop_per_s or 0) / 1e12:.0f} in fp8"
    print(f"{properties.name}: copies {ceilings.bytes_per_s / 1e12:.2f} TB/s, {rates}")


def run_tests(notes: Notes, paths: Sequence[str], num_processes: int) -> None:
    """Run tests, in parallel if pytest-xdist is installed."""
    command = [sys.executable, "-m", "pytest", *PYTEST_OPTIONS, *paths]
    if find_spec("xdist") is not None:
        command += ["-n", str(num_processes), "--dist", "worksteal"]
    tail = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        # Line by line, so that a part stopped at its limit has recorded its progress.
        for line in run.stdout:
            print(line, end="", flush=True)
            tail = (tail + line)[-TAIL_CHARACTERS:]
            notes.tell("tail", tail)
    if run.returncode:
        raise SystemExit(1)


def compile_all(runs: Iterable[Callable[[], object]]) -> None:
    """Compile the kernels that the runs launch; ignore errors, which recur and are recorded when timed."""

    def quietly(run: Callable[[], object]) -> None:
        with suppress(Exception):
            run()

    compile_ahead([partial(quietly, run) for run in runs], os.cpu_count() or 1)


def measure_attention(notes: Notes) -> None:
    """Time attention in the shapes of one layer of Llama-3.1-8B, then other libraries' attention."""
    benches = list(attention.benches(LLAMA, DEVICE, attempt=notes.attempt))
    compile_all(one.run for one in benches)
    ceilings, timer = measure_ceilings(), GpuTimer()
    tell_figures(notes, bench.measure(benches, ceilings, timer, notes.attempt))
    for name, make in attention.peers(LLAMA, DEVICE):
        with notes.attempt(name):
            tell_figures(notes, bench.measure([make()], ceilings, timer))


def measure_benches(notes: Notes, make: Callable[..., Iterable[bench.Bench]]) -> None:
    """Compile the kernels of benchmarks, which `make` returns, then time one after the other."""
    benches = list(make(DEVICE, attempt=notes.attempt))
    compile_all(one.run for one in benches)
    tell_figures(notes, bench.measure(benches, measure_ceilings(), GpuTimer(), notes.attempt))


def tell_figures(notes: Notes, figures: Iterable[bench.Figure]) -> None:
    """Record and print each figure as it is measured."""
    for figure in figures:
        notes.add("figures", asdict(figure))
        print(summary.line("figures", asdict(figure)), flush=True)


def measure_engine(notes: Notes, works: Sequence[engine.Work]) -> None:
    """Run engine rows with the same options on one engine, then trace the steps of some."""
    tell_results(notes, engine.measure(works, measure_ceilings(), attempt=notes.attempt, trace=partial(trace, notes)))


def measure_without(notes: Notes, works: Sequence[engine.Work], switch: Switch) -> None:
    """Run rows with a switch turned off."""
    switch.turn_off()
    tell_results(notes, engine.measure(works, measure_ceilings(), attempt=notes.attempt), f", {switch.name}")


def tell_results(notes: Notes, results: Iterable[engine.Result], suffix: str = "") -> None:
    """Record and print each result as it is measured; `suffix` is appended to the titles."""
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d ms %(name)s: %(message)s")
    with notes.log():
        for result in results:
            # More than was asked for if the start of an engine gave something up.
            notes.tell("without", [switch.name for switch in SWITCHES if switch.is_off])
            found = asdict(result) | {"title": result.title + suffix, "verdict": result.verdict}
            notes.add("results", found)
            print(summary.engine_line(found), flush=True)


def trace(notes: Notes, runs: Sequence[tuple[engine.Result, Callable[[], object]]]) -> None:
    """Record the rows in one trace file, keep it, and record what the device did in their steps."""
    path = notes.beside("trace.json.gz")
    spans = tracing.record(path, [run for _, run in runs])
    whole = tracing.read(path)
    for (result, _), span in zip(runs, spans, strict=True):
        with notes.attempt(f"trace of {result.title}"):
            told = {
                "title": result.title,
                "file": path.name,
                "plain_step_ms": result.step_ms,
                "host_ms": result.host_ms,
            }
            found = told | asdict(tracing.steps(whole, span))
            notes.add("traces", found)
            print(f"{summary.line('traces', found)}\n{summary.families_table(found)}", flush=True)


def measure_sweeps(notes: Notes) -> None:
    """Try other tile configurations of the kernels that dominate decoding."""
    found = list(sweep.sweeps(LLAMA, DEVICE, attempt=notes.attempt))
    ceilings, timer = measure_ceilings(), GpuTimer()
    for at in range(0, len(found), SWEEPS_AT_ONCE):
        some = found[at : at + SWEEPS_AT_ONCE]
        compile_all(run for one in some for run in one.runs)
        for one in some:
            with notes.attempt(one.name):
                best = sweep.measure(one, ceilings, timer)
                notes.add("sweeps", asdict(best))
                print(summary.line("sweeps", asdict(best)), flush=True)


def measure_tiers(notes: Notes) -> None:
    """Time the transfer of the KV cache blocks of an 8,192-token prompt to the host and back."""
    for figure in tiers.measure(LLAMA, DEVICE, num_blocks=512):
        notes.add("tiers", asdict(figure))
        share = figure.bytes_per_s / figure.plain_bytes_per_s
        print(f"{figure.name}: {figure.bytes_per_s / 1e9:.1f} GB/s, {share:.0%} of a plain copy", flush=True)


def measure_residency(notes: Notes, crowd: residency.Crowd, suffix: str = "") -> None:
    """Compare adapters that fit on the device with more than fit; a part that is stopped keeps its whole rounds."""
    notes.tell("crowd", asdict(crowd) | {"shared": residency.SHARED})
    print(f"{crowd}: {residency.SHARED}", flush=True)
    with notes.log():
        for rows in residency.measure(BASE_MODELS[0], crowd):
            found = [asdict(row) | {"name": row.name + suffix} for row in rows]
            notes.tell("residency", found)
            print("\n".join(summary.line("residency", row) for row in found), flush=True)


def measure_peers(notes: Notes) -> None:
    """Time decoding by other libraries."""
    for figure in peers.decode_ms("llama-3.1-8b", 1024, notes.attempt):
        notes.add("figures", asdict(figure))
        print(f"{figure.name}: {figure.step_ms:.2f} ms", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, write the results and print the summary; return 1 if something failed."""
    by_name = {part.name: part for part in parts()}
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("loadtest/results/gpu.json"))
    usual = [name for name, part in by_name.items() if part.is_usual]
    others = [name for name in by_name if name not in usual]
    parser.add_argument("--only", help=f"by commas, of {', '.join(usual)} (the default), {', '.join(others)}")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="for all of it")
    parser.add_argument("--part", nargs=2, metavar=("NAME", "NOTES"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    names = options.only.split(",") if options.only else usual
    if unknown := set(names) - by_name.keys():
        parser.error(f"--only: there is no part {', '.join(sorted(unknown))}")
    if not torch.cuda.is_available():
        raise SystemExit("loadtest.gpu: there is no GPU here")
    if options.part:
        notes = Notes(Path(options.part[1]))
        by_name[options.part[0]].run(notes)
        return int(notes.has_failures)
    # By default, SIGTERM would end this process alone, and the part would go on using the GPU.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    chosen = [by_name[name] for name in names]
    found = run_parts(chosen, options.out, options.seconds, this_command("loadtest.gpu"))
    found["verdicts"] = [asdict(row) for row in verdicts(found["parts"])]
    options.out.write_text(json.dumps(found, indent=2), encoding="utf-8")
    print(f"\n{summary.summary(found)}\n{found.get('seconds', 0):.0f} s; all of it is in {options.out}")
    return int(any(part["error"] for part in found["parts"].values()))


if __name__ == "__main__":
    sys.exit(main())
