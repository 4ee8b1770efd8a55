"""Serving launches nothing that a start has not: whatever comes together in a step, its kernels are there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.decoder.decoder import Decoder
from engine.decoder.reading import read_spec
from engine.gpu.adapters import TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.choosing import TokenChooser
from engine.gpu.rehearsal import Rehearsal, _steps
from engine.gpu.runtime import CudaRuntime
from engine.kv_cache import KvCache
from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu.engine import random_weights
from tests.engine.gpu.test_inputs import CONFIG
from tests.interpreter.uninterpreted import run_uninterpreted
from tests.kernels.gpu.conftest import DEVICE

STEPS = """
import json, random, sys
from dataclasses import replace
from pathlib import Path
import numpy as np, pytest, torch
from engine.decoder.decoder import Decoder
from engine.decoder.reading import read_spec
from engine.gpu.adapters import AdapterScope, TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.choosing import TokenChooser
from engine.gpu.model import recorded_sizes
from engine.gpu.rehearsal import Rehearsal
from engine.gpu.runtime import CudaRuntime
from engine.gpu.streamed_linear import stream_each
from engine.request import SamplingParams
from kernels.architecture import pretending
from kernels.embedding.launch import put_drawn
from kernels.recording import recording
from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu.engine import random_weights
from tests.engine.gpu.test_inputs import CONFIG
from tests.simulated_gpu.device import simulate

simulate(pytest.MonkeyPatch())
TINY = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 320, "eos_token_id": 2, "hidden_act": "silu"}
FEW = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
folder = Path(sys.argv[1])
(folder / "config.json").write_text(json.dumps(CONFIG_BY_NAME[sys.argv[2]] | TINY | FEW))
spec, device, runtime = read_spec(str(folder)), torch.device("cuda"), CudaRuntime(torch.device("cuda"))
config = replace(CONFIG, max_num_seqs=24, max_batched_tokens=2000, max_model_len=1100, max_adapter_rank=16)
sizes = config.max_num_seqs, config.max_adapter_rank, config.max_batched_tokens
adapters = TritonLora(runtime, *sizes, is_mixture=spec.experts is not None)
backend = TritonBackend(adapters, config.max_num_seqs)
with pretending("sm_90"):
    decoder = Decoder(spec, random_weights("", spec, torch.bfloat16, device), backend, config.max_model_len)
    choose = TokenChooser(runtime, 24, spec.vocab_size)
    rehearsal = Rehearsal(decoder, adapters, choose, config, torch.bfloat16, device)
    with recording() as known:
        stream_each(backend.linears)
        rehearsal.run()
    cache = rehearsal._cache()
    draw = random.Random(5)
    steps = [(size, []) for size in recorded_sizes(24)]
    steps += [
        (draw.randint(0, 20), [draw.randint(2, 1100) >> draw.randint(0, 8) or 2 for _ in range(draw.randint(1, 3))])
        for _ in range(15)
    ]
    with recording() as found, torch.inference_mode():
        for step in rehearsal.decodes():
            step()
        for num_decodes, chunks in steps:
            rows, at = [], 0
            for count in [1] * num_decodes + chunks:
                rows.append((at, count))
                at += count
            if at > 2000:
                continue
            for linear in backend.linears:
                linear.ways = tuple(draw.choice(linear.open_ways(rows)) for rows in linear.rows)
                can_norm = linear.is_after_norm and draw.random() < 0.5
                linear.normed_rows = tuple(rows for rows in (1, 2) if can_norm and linear.can_add(rows))
            for num_tiles in (0, draw.randint(1, len(rows))):
                scope = draw.choice([AdapterScope.LINEAR_MODULES, AdapterScope.WHOLE_MODEL])
                adapters.expect(num_tiles, scope, has_experts=draw.random() < 0.5)
                batch = rehearsal._batch(rows, num_decodes, cache.null_block)
                put_drawn(batch.token_ids[:num_decodes], batch.attention[0].rows[:num_decodes], batch.positions, -1)
                decoder.forward(replace(batch, sampled=batch.sampled[: draw.randint(0, 24)]), cache)
        logits = torch.zeros(24, spec.vocab_size, device=device)
        tables = torch.zeros_like(logits, dtype=torch.bool), torch.zeros_like(logits, dtype=torch.int32)
        for count in (1, 2, 3):
            params = [SamplingParams(max_tokens=1)] * count
            choose.edit(logits[:count], params, {0: np.zeros(9, np.uint8)}, {count - 1: 5}, tables)
            choose.tell(logits[:count], torch.zeros(count, dtype=torch.int64, device=device), 7 * count)
missing = [launch.title for launch in found if launch not in known]
assert not missing, missing
assert len(found) > 10
assert {"logit_edits_kernel", "joined_logprobs_kernel"} <= {launch.kernel for launch in found}
"""


@pytest.mark.parametrize("name", ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"])
def test_random_steps_launch_what_was_rehearsed(tmp_path: Path, name: str) -> None:
    """Whatever ways were measured to be the fastest."""
    # A GPU is simulated there, also beside a real one.
    run_uninterpreted("-c", STEPS, str(tmp_path), name, CUDA_VISIBLE_DEVICES="")


CHUNKS = """
from loadtest.gpu import state_launches
from kernels.architecture import pretending
from kernels.recording import recording

def launched(tokens):
    state_launches.BATCHES = ((1, tokens),)
    with pretending("sm_90"), recording() as found:
        state_launches.keep_states()
    return found

rehearsed = launched(512)
assert rehearsed
missing = [launch.title for tokens in (17, 500) for launch in launched(tokens) if launch not in rehearsed]
assert not missing, missing
"""


def test_layers_with_states_launch_the_same_for_chunks_of_any_length() -> None:
    """A rehearsal's chunks are multiples of 16, a prompt is not."""
    run_uninterpreted("-c", CHUNKS)


def tiny_rehearsal(tmp_path: Path) -> tuple[Rehearsal, TritonBackend]:
    tiny = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "vocab_size": 70, "eos_token_id": 2, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_BY_NAME["llama-3.1-8b"] | tiny))
    spec, runtime = read_spec(str(tmp_path)), CudaRuntime(DEVICE)
    config = replace(CONFIG, max_num_seqs=3, max_batched_tokens=6, max_model_len=8)
    adapters = TritonLora(runtime, config.max_num_seqs, config.max_adapter_rank, config.max_batched_tokens)
    backend = TritonBackend(adapters, config.max_num_seqs)
    weights = random_weights("", spec, torch.float32, runtime.device)
    decoder = Decoder(spec, weights, backend, config.max_model_len)
    choose = TokenChooser(runtime, config.max_num_seqs, spec.vocab_size)
    return Rehearsal(decoder, adapters, choose, config, torch.float32, runtime.device), backend


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> list[KvCache]:
    """Those that are made in a test."""
    made: list[KvCache] = []
    make = Rehearsal._cache

    def kept(self: Rehearsal, num_blocks: int = 1) -> KvCache:
        made.append(make(self, num_blocks))
        return made[-1]

    monkeypatch.setattr(Rehearsal, "_cache", kept)
    return made


@pytest.mark.skipif(torch.cuda.is_available(), reason="every start of an engine does it there")
def test_a_rehearsal_computes_and_writes_nothing(tmp_path: Path, caches: list[KvCache]) -> None:
    rehearsal, backend = tiny_rehearsal(tmp_path)
    rehearsal.run()
    assert not caches[0].data.any()
    assert backend.lora(()) is None


@pytest.mark.parametrize(("position", "slot"), [(0, 0), (5, 1), (1023, 3)])
def test_decodes_compute_the_same_each_time_and_write_one_place_of_each_row(
    tmp_path: Path, caches: list[KvCache], position: int, slot: int
) -> None:
    """At the asked position, or the last: contexts are of 8 tokens, and blocks of 4."""
    rehearsal, _ = tiny_rehearsal(tmp_path)
    for count, step in zip((1, 1, 3, 3), rehearsal.decodes(position), strict=True):
        logits = step().clone()
        assert logits.shape == (count, 70)
        assert logits.isfinite().all()
        assert torch.equal(step(), logits)
        written = caches[-1].data.abs().sum((0, 1, 4)) > 0
        assert written.tolist() == [[at == slot for at in range(4)]] * count + [[False] * 4] * (len(written) - count)


def test_every_size_is_there_and_the_last_step_is_the_fullest() -> None:
    steps = list(_steps(CONFIG))
    sizes = [sum(count for _, count in rows) for rows, _ in steps]
    assert sizes == [1, 2, 4, 8, 16, 32, CONFIG.max_batched_tokens]
    assert [num_decodes for _, num_decodes in steps] == [1, 2, 4, 6, 6, 6, 0]
    for rows, num_decodes in steps:
        assert [first for first, _ in rows] == [sum(count for _, count in rows[:i]) for i in range(len(rows))]
        assert all(count == 1 for _, count in rows[:num_decodes])
        assert all(count <= CONFIG.max_model_len for _, count in rows)
