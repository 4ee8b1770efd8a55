"""The GPU's benchmark without a GPU: what it would run runs, small, and its floors are arithmetic."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from engine import build
from engine.costs import prompt_flop
from engine.decoder.spec import read_spec
from engine.gpu.build import gpu_parts
from kernels.architecture import pretending
from kernels.launches import Geometry
from kernels.lora_shrink import launch as shrink_launch
from kernels.paged_attention import launch as attention_launch
from kernels.streamed_linear import launch as streamed_launch
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from loadtest.gpu import __main__ as command
from loadtest.gpu import engine, kernels, peers, summary, sweep
from loadtest.gpu.parts import Notes
from loadtest.gpu.timing import Ceilings
from loadtest.workloads import token_prompt
from tests.engine.gpu.host_runtime import HostRuntime

CEILINGS = Ceilings(bytes_per_s=4e12, flop_per_s=8e14)
GEOMETRY = Geometry(name="tiny", hidden=128, inner=128, heads=8, kv_heads=2, head_dim=16)
HERE = torch.device("cpu")
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
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_launch, "PROGRAMS_WANTED", 2)
    monkeypatch.setattr(shrink_launch, "PROGRAMS_WANTED", 2)
    monkeypatch.setattr(streamed_launch, "PROGRAMS_WANTED", 2)


def test_a_floor_is_the_longer_of_moving_and_computing() -> None:
    assert CEILINGS.floor_s(4e12, 0) == 1.0
    assert CEILINGS.floor_s(4e12, 16e14) == 2.0


@no_gpu
def test_every_kernel_is_run_on_what_it_takes() -> None:
    benches = list(kernels.benches(GEOMETRY, HERE, scale=512))
    figures = list(kernels.measure(benches, CEILINGS, CountingTimer()))
    assert all(figure.gb_per_s > 0 for figure in figures)
    assert len({figure.name.split(",")[0] for figure in figures}) == 15
    assert "one of them of 64" in " ".join(figure.name for figure in figures)


@no_gpu
def test_products_of_8_bits_are_timed_where_they_are() -> None:
    with pretending("sm_90"):
        benches = list(kernels._library_products(GEOMETRY, HERE, rows=16))
    assert [bench.name.split(",")[0] for bench in benches] == [
        "the library's large product",
        "the library's fp8 product",
        "the library's fp8 product added up fast",
    ]
    for bench in benches:
        bench.run()


@no_gpu
def test_a_sweep_finds_what_is_faster_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "TILES", ((16, 4, 3), (32, 4, 3)))
    monkeypatch.setattr(sweep, "DENSE", ((64, 64, 4, 4), (32, 128, 4, 4)))
    monkeypatch.setattr(sweep, "INT4", ((32, 128, 4, 4),))
    for one in sweep.sweeps(GEOMETRY, HERE, scale=64):
        found = sweep.measure(one, CEILINGS, CountingTimer())
        assert None not in found.us_by_cut.values()
        assert found.best == list(found.us_by_cut)[-1]
        broken = replace(one, others=[({"n": 1}, lambda one=one: one.usual() * 2), ({"n": 2}, lambda: 1 / 0)])
        assert sweep.measure(broken, CEILINGS, CountingTimer()).us_by_cut == {"n=1": None, "n=2": None}


@no_gpu
def test_parts_note_and_print_what_they_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command's own way through them, with a trial's sizes and clock."""
    for name, value in (
        ("DEVICE", HERE),
        ("GEOMETRIES", (GEOMETRY,)),
        ("measure_ceilings", lambda: CEILINGS),
        ("GpuTimer", CountingTimer),
        ("compile_ahead", lambda runs, num_processes: [run() for run in runs]),
    ):
        monkeypatch.setattr(command, name, value)
    broken = kernels.Bench(name="broken", run=lambda: 1 / 0, num_bytes=1)
    monkeypatch.setattr(
        kernels,
        "benches",
        lambda geometry, device, attempt: [broken, *kernels._elementwise(geometry, device, tokens=3)],
    )
    monkeypatch.setattr(
        sweep, "sweeps", lambda geometry, device, attempt: sweep._attention(geometry, device, 1, 40, (1, 2))
    )
    results = [_result(target=0.5), _result(target=None)]
    monkeypatch.setattr(engine, "measure", lambda works, ceilings, attempt: iter(results))
    monkeypatch.setattr(
        peers,
        "decode_ms",
        lambda model, context, tell, attempt: tell(peers.PeerFigure(name="peer, compiled", step_ms=3.25)),
    )
    parts: dict[str, dict[str, object]] = {}
    for part in command.parts():
        if part.name in ("kernels", "llama-3.1-8b", "sweep", "peers"):
            notes = tmp_path / part.name
            part.run(Notes(notes))
            parts[part.name] = {"seconds": 1.0, "error": None} | json.loads(notes.read_text())
    said = capsys.readouterr().out
    text = summary.summary({"parts": parts})
    for known in ("add and norm, 3 tokens", "decode attention, 1 rows of 40", "peer, compiled", "MISSED"):
        assert known in said
        assert known in text
    assert "broken" in text
    assert "ZeroDivisionError: division by zero" in text


def test_tests_tell_line_by_line_how_far_they_came(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
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
        floor_ms=1.0,
        of_floor=0.25,
        target=target,
        tokens_per_s=250.0,
        num_compiled=0,
        ms_by_part={"forward": 1.0},
    )


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
    step_ms_by_name: dict[str, float] = {}
    notes = Notes(tmp_path / "notes")

    def tell(figure: peers.PeerFigure) -> None:
        step_ms_by_name[figure.name.split(":")[0]] = figure.step_ms
        if "as it is" in figure.name:
            raise ValueError("what one way does is nothing to the others")

    peers.decode_ms("tiny", 8, tell, notes.attempt, disable_compile=True)
    batched = "transformers, continuous batching"
    assert list(step_ms_by_name) == ["transformers, as it is", batched, "transformers, compiled, static cache"]
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
    assert prompt_flop(spec, 8192) == pytest.approx(0.132e15, rel=0.03)


def test_rows_of_one_engine_are_one_part() -> None:
    groups = engine.groups()
    assert sum(map(len, groups.values())) == sum(map(len, engine.WORKS_BY_MODEL.values()))
    assert {"llama-3.1-8b", "qwen3-0.6b", "llama-3.1-8b-fp8_quantization-fp8_kv"} <= set(groups)
    assert all(len({str(work.options) for work in works}) == 1 for works in groups.values())


@no_gpu
def test_engine_rows_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_cpu_parts", partial(gpu_parts, runtime=HostRuntime()))
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | TINY)
    work = engine.Work(model="tiny", batch=2, context=5, answer_tokens=3, target=0.9)
    with_adapters = replace(work, num_adapters=2)
    works = (work, with_adapters, replace(work, batch=1, answer_tokens=1), replace(with_adapters, batch=1))
    options = {"device": "cpu", "dtype": "float32", "max_batched_tokens": 16, "num_threads": 1}
    prompts: list[list[int]] = []

    def noted(*args: Any, **named: Any) -> list[int]:
        prompts.append(token_prompt(*args, **named))
        return prompts[-1]

    monkeypatch.setattr(engine, "token_prompt", noted)
    results = list(engine.measure(works, CEILINGS, kv_cache_bytes=1 << 20, **options))
    # No prompt begins as one before it: what is in the cache is not computed.
    assert len({tuple(prompt[:4]) for prompt in prompts}) == len(prompts)
    assert [result.title for result in results] == [work.title for work in works]
    assert all(result.step_ms > result.floor_ms > 0 for result in results if "adapters" not in result.title)
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


def test_random_weights_fill_a_decoder(tmp_path: Path) -> None:
    write_checkpoint(CONFIG_BY_NAME["qwen3-0.6b"] | TINY | {"head_dim": 16}, tmp_path)
    spec = read_spec(str(tmp_path))
    found = dict(engine.random_weights("", spec, torch.float32, HERE))
    assert {"embedding", "layers.0.q_norm", "layers.0.qkv.weight", "norm"} <= set(found)
    assert all(tensor.isfinite().all() for tensor in found.values())
