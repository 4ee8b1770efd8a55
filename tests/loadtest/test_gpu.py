"""The GPU's benchmark without a GPU: what it would run runs, small, and its floors are arithmetic."""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from engine.costs import prompt_flop
from engine.decoder.reading import read_spec
from engine.gpu import backend
from kernels.architecture import pretending
from kernels.lora_shrink import launch as shrink_launch
from kernels.streamed_linear import launch as streamed_launch
from kernels.streamed_linear.reference import to_int4
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from loadtest.gpu import __main__ as command
from loadtest.gpu import attention, bench, engine, kernels, peers, summary, sweep, tracing, verdicts
from loadtest.gpu.attention import Form
from loadtest.gpu.parts import LEAST_S, Notes, Part
from loadtest.gpu.sizes import Geometry
from loadtest.gpu.timing import Ceilings
from loadtest.workloads import token_prompt
from tests.architecture.source_tree import ROOT
from tests.parity.gpu_parts import Replays
from tests.simulated_gpu.device import in_order
from tests.simulated_gpu.services import CudaGraph

CEILINGS = Ceilings(bytes_per_s=4e12, flop_per_s=8e14)
GEOMETRY = Geometry(name="tiny", hidden=128, inner=128, heads=8, kv_heads=2, head_dim=16)
HERE = torch.device("cuda")
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 700,
    "max_position_embeddings": 128,
}
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs there")


class CountingTimer:
    """Runs what it is given once, and finds each faster than the one before."""

    def __init__(self) -> None:
        self._seconds = 1.0

    def seconds(self, run: object) -> float:
        assert callable(run)
        run()
        self._seconds /= 2
        return self._seconds


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    """A simulated one, of few programs."""
    monkeypatch.setattr(shrink_launch, "PROGRAMS_WANTED", 2)
    monkeypatch.setattr(streamed_launch, "PROGRAMS_WANTED", 2)
    with in_order():
        # Not one that has 8-bit floats, whose products are tried apart.
        yield Replays(monkeypatch, target="sm_80")


def test_a_floor_is_the_longer_of_moving_and_computing() -> None:
    assert CEILINGS.floor_s(4e12, 0) == 1.0
    assert CEILINGS.floor_s(4e12, 16e14) == 2.0


@no_gpu
def test_every_kernel_is_run_on_what_it_takes() -> None:
    benches = [one for family in (attention, kernels) for one in family.benches(GEOMETRY, HERE, scale=512)]
    figures = list(bench.measure(benches, CEILINGS, CountingTimer()))
    assert all(figure.gb_per_s > 0 for figure in figures)
    assert len({figure.name.split(",")[0] for figure in figures}) == 30
    assert "one of them of 64" in " ".join(figure.name for figure in figures)


@no_gpu
def test_attention_of_every_form_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [(replace(geometry, heads=2, kv_heads=1), form) for geometry, form in attention.FORMS]
    monkeypatch.setattr(attention, "FORMS", tuple(small))
    figures = list(bench.measure(attention.forms(HERE, scale=512), CEILINGS, CountingTimer()))
    # sm_80 has no 8-bit floats.
    assert len(figures) == 2 * (len(attention.FORMS) - 1)
    assert all(figure.gb_per_s > 0 for figure in figures)


def test_what_is_computed_of_a_window_is_counted() -> None:
    whole, windowed = (attention._prompt(GEOMETRY, HERE, 64, "", form) for form in (Form(), Form(window=16)))
    pairs = [sum(min(position + 1, window) for position in range(64)) for window in (64, 16)]
    for found, num_pairs in ((whole, pairs[0]), (windowed, pairs[1])):
        assert found.num_flop == pytest.approx(4 * num_pairs * GEOMETRY.heads * GEOMETRY.head_dim, rel=0.05)


def test_every_key_of_a_long_row_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were those of the other rows, and what the device's cache gave back counted as read from memory."""
    monkeypatch.setattr(attention, "paged_attention", lambda **options: options)
    attend, num_bytes = attention.attention_inputs(GEOMETRY, torch.device("cpu"), rows=3, context=32, longest=80)
    given: Any = attend(None)
    assert given["rows"][:, 1].tolist() == [79, 31, 31]
    read = [*given["tables"][0, :5].tolist(), *given["tables"][1:, :2].flatten().tolist()]
    assert sorted(read) == list(range(9))
    held = given["k_cache"][read].nbytes + given["v_cache"][read].nbytes
    assert num_bytes == held + 2 * given["q"].nbytes


@no_gpu
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_others_attend_in_the_shape_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    """flashinfer is not here: what it would be told is looked at, and is what its documentation has."""
    planned: list[tuple[Any, ...]] = []

    class Wrapper:
        def __init__(self, workspace: torch.Tensor, layout: str, **_options: object) -> None:
            assert workspace.dtype == torch.uint8
            assert layout == "NHD"

        def plan(self, *arguments: Any, **types: torch.dtype) -> None:
            planned.append(arguments)
            assert types.keys() == {"q_data_type", "kv_data_type"}

        def run(self, q: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor]) -> None:
            assert q.shape == (2, GEOMETRY.heads, GEOMETRY.head_dim)
            assert cache[0].shape == cache[1].shape == (8, 16, GEOMETRY.kv_heads, GEOMETRY.head_dim)

    module = ModuleType("flashinfer")
    module.__spec__ = ModuleSpec("flashinfer", None)
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(torch, "compile", lambda function, **_options: function)
    monkeypatch.setattr(attention, "WORKSPACE_BYTES", 16)
    monkeypatch.setattr(attention, "CONTEXT", 62 * 32)
    benches = [make() for _, make in attention.peers(GEOMETRY, torch.device("cpu"), scale=32)]
    assert [one.name.split(" decode")[0] for one in benches] == ["torch's", "torch's compiled flex", "flashinfer's"]
    expected, flex, _ = [one.run() for one in benches]
    assert isinstance(expected, torch.Tensor)
    assert isinstance(flex, torch.Tensor)
    assert expected.shape == flex.shape == (2, GEOMETRY.heads, 1, GEOMETRY.head_dim)
    # Each of two rows has four pages of its own, the last of which holds 14 tokens.
    ((starts, pages, last, heads, kv_heads, head_dim, page),) = planned
    assert starts.tolist() == [0, 4, 8]
    assert sorted(pages.tolist()) == list(range(8))
    assert last.tolist() == [14, 14]
    assert (heads, kv_heads, head_dim, page) == (GEOMETRY.heads, GEOMETRY.kv_heads, GEOMETRY.head_dim, 16)
    assert {numbers.dtype for numbers in (starts, pages, last)} == {torch.int32}


@no_gpu
def test_products_of_8_bits_are_timed_where_they_are() -> None:
    with pretending("sm_90"):
        benches = list(kernels._library_products(GEOMETRY, HERE, rows=16))
    assert [bench.name.split(",")[0] for bench in benches] == [
        "the library's large product",
        "the library's fp8 product",
        "the library's fp8 product added up fast",
    ]
    for one in benches:
        one.run()


@no_gpu
def test_a_sweep_finds_what_is_faster_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "SHARES", ((16, 16, 2, 4, 3), (8, 32, 2, 4, 3)))
    monkeypatch.setattr(sweep, "ROPE", ((1, 2, 1, 1), (2, 4, 2, 4)))
    monkeypatch.setattr(sweep, "DENSE", ((64, 64, 4, 4), (32, 128, 4, 4)))
    monkeypatch.setattr(sweep, "INT4", ((32, 128, 4, 4),))
    # Small, several sizes of rows are one.
    sweep_by_name = {one.name: one for one in sweep.sweeps(GEOMETRY, HERE, scale=256)}
    for one in sweep_by_name.values():
        found = sweep.measure(one, CEILINGS, CountingTimer())
        assert None not in found.us_by_cut.values()
        assert found.best == list(found.us_by_cut)[-1]
    broken = replace(one, others=[({"n": 1}, lambda: one.usual() * 2), ({"n": 2}, lambda: 1 / 0)])
    assert sweep.measure(broken, CEILINGS, CountingTimer()).us_by_cut == {"n=1": None, "n=2": None}


def test_a_product_of_four_bits_reads_scales_too() -> None:
    """Without them, a kernel's share of the ceiling was 6% lower than in the part `kernels`."""
    found = sweep._product(to_int4(torch.ones(64, 256, dtype=torch.bfloat16)), 1, torch.bfloat16, ())
    assert found.num_bytes == 64 * 256 // 2 + 64 * 2 * 4 + 2 * (64 + 256)


@no_gpu
def test_parts_note_and_print_what_they_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's own way through them, with a trial's sizes and clock."""
    for name, value in (
        ("DEVICE", HERE),
        ("LLAMA", GEOMETRY),
        ("measure_ceilings", lambda: CEILINGS),
        ("GpuTimer", CountingTimer),
        ("compile_ahead", lambda runs, num_processes: [run() for run in runs]),
    ):
        monkeypatch.setattr(command, name, value)
    broken = bench.Bench(name="broken", run=lambda: 1 / 0, num_bytes=1)
    monkeypatch.setattr(
        kernels,
        "benches",
        lambda geometry, device, attempt: [broken, *kernels._elementwise(geometry, device, tokens=3)],
    )
    attending = [bench.Bench(name=verdicts.ATTENTION, run=lambda: None, num_bytes=1e12)]
    monkeypatch.setattr(attention, "benches", lambda geometry, device, attempt: attending)
    peer = bench.Bench(name="peer that attends", run=lambda: None, num_bytes=1)
    monkeypatch.setattr(
        attention, "peers", lambda geometry, device: [("peer not made", lambda: 1 / 0), (peer.name, lambda: peer)]
    )
    monkeypatch.setattr(sweep, "sweeps", lambda geometry, device, attempt: sweep._attention(geometry, device, 1, 40))
    results = [_result(target=0.5), _result(target=None)]
    monkeypatch.setattr(engine, "measure", lambda works, ceilings, attempt, trace: iter(results))
    figure = peers.PeerFigure(name="peer, compiled", step_ms=3.25)
    monkeypatch.setattr(peers, "decode_ms", lambda model, context, attempt: iter([figure]))
    parts: dict[str, dict[str, object]] = {}
    for part in command.parts():
        if part.name in ("attention", "kernels", "llama-3.1-8b", "sweep", "peers"):
            notes = tmp_path / part.name
            part.run(Notes(notes))
            parts[part.name] = {"seconds": 1.0, "error": None} | json.loads(notes.read_text())
    said = capsys.readouterr().out
    text = summary.summary({"parts": parts})
    for known in (
        "add and norm, 3 tokens",
        "decode attention, 1 rows of 40",
        "peer, compiled",
        "that attends",
        "MISSED",
    ):
        assert known in said
        assert known in text
    assert "broken" in text
    assert "peer not made" in text
    assert "ZeroDivisionError: division by zero" in text


def test_the_whole_of_it_ends_with_what_is_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def run_parts(parts: list[Part], *_rest: object) -> dict[str, Any]:
        asked.append([part.name for part in parts])
        return {"parts": {part.name: {"seconds": 1.0, "error": None} for part in parts}, "seconds": 5.0}

    monkeypatch.setattr(command, "run_parts", run_parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    out = tmp_path / "out.json"
    assert command.main(["--out", str(out)]) == 0
    assert command.main(["--out", str(out), "--only", "sweep,facts"]) == 0
    assert asked == [[part.name for part in command.parts() if part.is_usual], ["sweep", "facts"]]
    assert len(json.loads(out.read_text())["verdicts"]) == 17
    assert capsys.readouterr().out.count(verdicts.UNMEASURED) == 34


def test_tests_tell_line_by_line_how_far_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    # Of other plugins, some take seconds to import, in each process.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    (tmp_path / "test_some.py").write_text("def test_good(): pass\ndef test_bad(): assert False\n")
    notes = tmp_path / "notes"
    with pytest.raises(SystemExit):
        command.run_tests(Notes(notes), [str(tmp_path / "test_some.py"), f"--rootdir={tmp_path}"], num_processes=1)
    for said in (capfd.readouterr().out, json.loads(notes.read_text())["tail"]):
        assert "PASSED" in said
        assert "FAILED" in said


def _result(target: float | None) -> engine.Result:
    return engine.Result(
        title="work",
        step_ms=4.0,
        bytes_ms=1.0,
        flop_ms=0.5,
        floor_ms=1.0,
        of_floor=0.25,
        target=target,
        tokens_per_s=250.0,
        num_compiled=0,
        ms_by_part={"forward": 1.0},
    )


def _first_fails(alone_ms: Callable[..., float], asked: list[object], *arguments: Any) -> float:
    asked.append(arguments)
    if len(asked) == 1:
        raise ValueError("what one way does is nothing to the others")
    return alone_ms(*arguments)


@no_gpu
def test_peers_are_timed_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def generate_batch(decoder: object, inputs: list[list[int]], **_options: object) -> dict[str, SimpleNamespace]:
        """The second begins 3 s after the first, and both take 2 s for a token."""
        return {
            str(row): SimpleNamespace(timestamps=[3.0 * row + 2.0 * step for step in range(4)], error=None)
            for row in range(len(inputs))
        }

    monkeypatch.setattr(peers, "NUM_TOKENS", 4)
    monkeypatch.setattr(peers, "BATCH", 2)
    monkeypatch.setattr(transformers.LlamaForCausalLM, "generate_batch", generate_batch)
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | TINY)
    monkeypatch.setattr(peers, "_alone_ms", partial(_first_fails, peers._alone_ms, []))
    notes = Notes(tmp_path / "notes")
    found = peers.decode_ms("tiny", 8, notes.attempt, disable_compile=True)
    step_ms_by_name = {figure.name.split(":")[0]: figure.step_ms for figure in found}
    batched = "transformers, continuous batching"
    assert list(step_ms_by_name) == [batched, "transformers, compiled, static cache"]
    # At 3 and at 5 s; at 6 s the first is done.
    assert step_ms_by_name[batched] == 2000.0
    assert notes.has_failures


def test_the_floors_of_a_known_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["llama-3.1-8b"]))
    spec = read_spec(str(tmp_path))
    work = engine.Work(model="llama-3.1-8b", batch=64, context=1024, answer_tokens=0)
    # 8.03 billion weights, less the embedding of which a step reads some rows, and 128 KiB of cache for each token.
    assert engine.step_bytes(spec, work, 2) == pytest.approx(2 * 7.505e9 + 64 * 1024 * 131_072, rel=1e-3)
    halved = replace(work, quantization="fp8", kv_cache_dtype="fp8")
    # The output matrix stays in two bytes, and every key and value of 128 bytes has a span of four.
    assert engine.step_bytes(spec, halved, 2) == pytest.approx(
        6.980e9 + 2 * 0.525e9 + 64 * 1024 * 65_536 * 132 / 128, rel=1e-3
    )
    # Half a byte for each weight of a layer, and four for each group of 128.
    assert engine.step_bytes(spec, replace(work, batch=0, quantization="int4"), 2) == pytest.approx(
        6.980e9 * (0.5 + 4 / 128) + 2 * 0.525e9, rel=1e-3
    )
    prompt = replace(work, batch=1, context=8192, answer_tokens=1)
    assert engine.step_flop(spec, prompt) == (prompt_flop(spec, 8192), 0.0)
    assert prompt_flop(spec, 8192) == pytest.approx(0.132e15, rel=0.03)
    # Two for each weight that a step reads, and four for each number of a query and each of 1,024 keys, in 32 layers.
    assert engine.step_flop(spec, work) == pytest.approx((64 * (2 * 7.505e9 + 4 * 4096 * 1024 * 32), 0.0), rel=1e-3)
    # In fp8, all but attention and the output matrix.
    assert engine.step_flop(spec, halved) == pytest.approx(
        (64 * (2 * 0.525e9 + 4 * 4096 * 1024 * 32), 64 * 2 * 6.980e9), rel=1e-3
    )
    in_fp8 = engine.step_flop(spec, replace(prompt, quantization="fp8"))
    assert in_fp8 == pytest.approx((prompt_flop(spec, 8192) - in_fp8[1], 8192 * 2 * 6.980e9), rel=1e-3)


def test_rows_of_one_engine_are_one_part() -> None:
    groups = engine.groups()
    assert sum(map(len, groups.values())) == sum(map(len, engine.WORKS_BY_MODEL.values()))
    assert {"llama-3.1-8b", "qwen3-0.6b", "llama-3.1-8b-fp8_quantization-fp8_kv"} <= set(groups)
    assert all(len({str(work.options) for work in works}) == 1 for works in groups.values())


@no_gpu
def test_engine_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | TINY)
    work = engine.Work(model="tiny", batch=2, context=5, answer_tokens=3, target=0.9)
    with_adapters = replace(work, num_adapters=2)
    works = (work, with_adapters, replace(work, batch=1, answer_tokens=1), replace(with_adapters, batch=1))
    options = {"dtype": "float32", "max_batched_tokens": 16, "num_threads": 1}
    prompts: list[list[int]] = []

    def noted(*args: Any, **named: Any) -> list[int]:
        prompts.append(token_prompt(*args, **named))
        return prompts[-1]

    monkeypatch.setattr(engine, "token_prompt", noted)
    results = list(engine.measure(works, CEILINGS, kv_cache_bytes=1 << 20, **options))
    assert all(0 < result.host_ms <= result.step_ms for result in results)
    # No prompt begins as one before it: what is in the cache is not computed.
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)
    assert [result.title for result in results] == [work.title for work in works]
    assert all(
        result.step_ms > result.floor_ms == max(result.bytes_ms, result.flop_ms) > 0
        for result in results
        if "adapters" not in result.title
    )
    # Adapters are held against the same row without; where there is none, nothing is said of a target.
    assert results[1].floor_ms == results[0].step_ms
    assert results[1].target == 0.9
    assert results[3].target is None
    assert results[0].target == 0.9
    assert results[0].verdict == "MISSED"
    told = {
        "results": [asdict(result) | {"verdict": result.verdict} for result in results],
        "error": None,
        "seconds": 1,
    }
    text = summary.summary({"parts": {"tiny": told, "sweep": {"error": "stopped after 9 s", "seconds": 9.0}}})
    assert "MISSED" in text
    assert "stopped after 9 s" in text


@no_gpu
def test_a_model_that_transformers_computes_is_measured_too(a_gpu: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkpoint that is written for it, and by recorded steps."""
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["seed-oss-0.6b"] | TINY | {"head_dim": 16})
    work = engine.Work(model="tiny", batch=2, context=5, answer_tokens=3)
    options = {"dtype": "float32", "max_batched_tokens": 16, "num_threads": 1}
    (result,) = engine.measure([work], CEILINGS, kv_cache_bytes=1 << 20, **options)
    assert result.step_ms > result.floor_ms > 0
    assert a_gpu.are_there


def _annotated(replay: Callable[[CudaGraph], None]) -> Callable[[CudaGraph], None]:
    """Return what replays as a GPU's trace has it."""

    def annotated(graph: CudaGraph) -> None:
        with torch.profiler.record_function(f"stand-in for a {tracing.LAUNCH}"):
            replay(graph)

    return annotated


def test_what_an_engine_gives_up_is_noted_at_once_and_told_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was in the log only, and the switches that were off were noted after the last row, which a limit cut off."""
    monkeypatch.setattr(backend, "JOINS_ARE_WANTED", False)

    def results() -> Iterator[engine.Result]:
        logging.getLogger("engine.gpu.streamed_linear").error("products of (8, 8) are wrong")
        yield _result(target=None)
        raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        command.tell_results(Notes(tmp_path / "notes"), results())
    logging.getLogger("engine.gpu.trial").error("of another engine")
    told = json.loads((tmp_path / "notes").read_text())
    assert told["without"] == ["apart"]
    assert told["log"] == [{"level": "ERROR", "message": "products of (8, 8) are wrong"}]
    text = summary.summary({"parts": {"tiny": told | {"error": "stopped after 9 s", "seconds": 9.0}}})
    assert "products of (8, 8) are wrong" in text


@no_gpu
def test_steps_of_the_engines_loop_are_traced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By the profiler, from the engine's own loop, through the trace that is kept; operators stand in for kernels."""
    monkeypatch.setattr(CudaGraph, "replay", _annotated(CudaGraph.replay))
    monkeypatch.setattr(tracing, "DEVICE_CATEGORIES", frozenset({"cpu_op"}))
    monkeypatch.setattr(tracing, "SKIPPED_STEPS", 1)
    monkeypatch.setattr(tracing, "NUM_STEPS", 2)
    monkeypatch.setattr(command, "measure_ceilings", lambda: CEILINGS)
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | TINY)
    options = {"dtype": "float32", "max_batched_tokens": 16, "num_threads": 1}
    monkeypatch.setattr(engine, "measure", partial(engine.measure, kv_cache_bytes=1 << 20, **options))
    work = engine.Work(model="tiny", batch=2, context=5, answer_tokens=6, is_traced=True)
    short = replace(work, batch=1, answer_tokens=3)
    notes = Notes(tmp_path / "out.tiny.json")
    caplog.set_level(logging.INFO)
    command.measure_engine(notes, [work, replace(work, batch=1, is_traced=False), short])
    told = json.loads((tmp_path / "out.tiny.json").read_text())
    assert [result["title"] for result in told["results"]][::2] == [work.title, short.title]
    (trace,) = told["traces"]
    assert (tmp_path / trace["file"]).name == "out.tiny.trace.json.gz"
    assert (tmp_path / trace["file"]).exists()
    assert trace["title"] == work.title
    assert trace["num_steps"] == 2
    assert 0 < trace["busy_ms"] <= trace["step_ms"]
    assert 0 < trace["host_ms"] <= trace["plain_step_ms"]
    assert trace["families"]
    # Two replays are too few for the short one, which is told.
    assert "2 replays of this run" in told["failures"][0]["why"]
    messages = [entry["message"] for entry in told["log"]]
    assert any(message.startswith("recorded ") for message in messages)
    assert not any(message.startswith("recording ") for message in messages), "progress is for those who wait"
    text = summary.summary({"parts": {"tiny": told | {"error": None, "seconds": 1.0}}})
    for known in (f"kernels of a step: {work.title}", "none: the device idles"):
        assert known in text
        assert known in capsys.readouterr().out or known in text


def test_every_part_that_a_target_needs_has_its_whole_time_as_the_readme_says() -> None:
    usual = [part for part in command.parts() if part.is_usual]
    names = [part.name for part in usual]
    first = usual[: names.index("tokens")]
    # Adapters that do not fit are after the tests of tokens, which they would leave too little time.
    assert names == [*(part.name for part in first), "tokens", "residency", "peers"]
    wanted = {part.name for part in first}
    for name, works in engine.groups().items():
        if any(work.target is not None or work.is_traced or work == engine.FP8_DECODE for work in works):
            assert name in wanted
    left_s = command.BUDGET_S - sum(part.limit_s for part in first)
    assert left_s >= 6 * LEAST_S
    readme = (Path(command.__file__).parents[1] / "README.md").read_text()
    assert [f"`{part.name}` | {part.limit_s}" for part in usual] == re.findall(r"^\| (`\S+` \| \d+) \|", readme, re.M)
    assert f"leave {left_s} of the {command.BUDGET_S} seconds" in readme


def test_the_tests_that_it_runs_are_there() -> None:
    for path in (*command.TOKEN_TESTS, *command.OTHER_TOKEN_TESTS, *command.KERNEL_TESTS):
        name, _, test = path.partition("::")
        assert (ROOT / name).exists()
        assert not test or f"def {test}(" in (ROOT / name).read_text()


def test_random_weights_fill_a_decoder(tmp_path: Path) -> None:
    write_checkpoint(CONFIG_BY_NAME["qwen3-0.6b"] | TINY | {"head_dim": 16}, tmp_path)
    spec = read_spec(str(tmp_path))
    found = dict(engine.random_weights("", spec, torch.float32, HERE))
    assert {"embedding", "layers.0.q_norm", "layers.0.qkv.weight", "norm"} <= set(found)
    assert all(tensor.isfinite().all() for tensor in found.values())
