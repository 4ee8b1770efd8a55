"""One request alone, in every family: what we compute is what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.backend import CpuBackend, KvCache
from engine.buffers import InputBuffers
from engine.build import build_engine
from engine.config import EngineConfig
from engine.decoder.decoder import Decoder, DecoderBatch
from engine.decoder.spec import read_spec
from engine.loading.checkpoint import load_parameters
from engine.resolve import Hardware, resolve
from engine.step import StepPlan, StepRow
from tests.parity.conftest import MAX_LEN, Checkpoint, greedy, make_model, random_prompts, run_engine

CPU = torch.device("cpu")


def our_logits(path: str, prompt: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Logits of every position by our decoder, in one step."""
    spec = read_spec(path)
    hardware = Hardware(device="cpu", num_cores=1, free_bytes=1 << 30, has_fast_bfloat16=False)
    config = resolve(EngineConfig(model_path=path, max_model_len=MAX_LEN, max_num_seqs=1), spec, hardware)
    decoder = Decoder(spec, load_parameters(path, spec, dtype, CPU), CpuBackend(), MAX_LEN)
    cache = KvCache(
        num_layers=spec.num_layers,
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=CPU,
    )
    row = StepRow(
        row=0,
        is_admission=True,
        request=greedy("a", prompt),
        output_ids=[],
        start=0,
        end=len(prompt),
        block_ids=list(range(config.max_blocks_per_request)),
        samples=True,
    )
    buffers = InputBuffers(config, cache.null_block)
    token_ids, positions, attention = buffers.fill(StepPlan(step_id=1, rows=(row,)))
    batch = DecoderBatch(
        token_ids=token_ids,
        positions=positions,
        sampled=torch.arange(len(prompt)),
        attention=attention,
        lora=None,
    )
    return decoder.forward(batch, cache)


def test_a_request_alone_gets_the_tokens_of_transformers(family: Checkpoint) -> None:
    engine = build_engine(EngineConfig(model_path=family.path, dtype="float32", num_threads=1))
    for prompt in random_prompts(3, longest=70):
        assert run_engine(engine, [greedy("a", prompt)]) == {"a": family.generate(prompt)}


def test_float32_logits_are_those_of_transformers(family: Checkpoint) -> None:
    prompt = random_prompts(2, longest=90)[1]
    torch.testing.assert_close(
        our_logits(family.path, prompt, torch.float32), family.logits(prompt), atol=1e-3, rtol=1e-4
    )


def test_bfloat16_logits_err_no_more_than_those_of_transformers(family: Checkpoint) -> None:
    """Both round at every operation, in another order; the root mean square of the error is the same within a fifth."""
    prompt = random_prompts(2, longest=90)[1]
    exact = family.logits(prompt)
    theirs = (family.logits(prompt, torch.bfloat16) - exact).square().mean().sqrt()
    ours = (our_logits(family.path, prompt, torch.bfloat16) - exact).square().mean().sqrt()
    assert ours < 1.2 * theirs


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaled_rotation_gives_the_tokens_of_transformers(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 5000.0, "factor": 4.0}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = 64
    model = make_model("llama3", rope_parameters=rope)
    model.save_pretrained(tmp_path)
    ours = Checkpoint(path=str(tmp_path), model=model)
    engine = build_engine(EngineConfig(model_path=ours.path, dtype="float32", num_threads=1))
    prompt = random_prompts(2, longest=120)[1]
    assert run_engine(engine, [greedy("a", prompt)]) == {"a": ours.generate(prompt)}


def test_a_sharded_checkpoint_is_the_same_model(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    whole = checkpoint("qwen2")
    whole.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    engine = build_engine(EngineConfig(model_path=str(tmp_path), dtype="float32", num_threads=1))
    prompt = random_prompts(2, longest=40)[1]
    assert run_engine(engine, [greedy("a", prompt)]) == {"a": whole.generate(prompt)}
