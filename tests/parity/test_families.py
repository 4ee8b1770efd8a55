"""The numbers of every family, and forms of checkpoints: what we compute is what transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.config import EngineConfig
from engine.cpu.build import build_model, start_threads
from engine.decoder.reading import read_spec
from engine.hardware import probe
from engine.resolve import resolve
from engine.step import StepPlan, StepRow
from tests.parity.conftest import MAX_LEN, Checkpoint, greedy, make_model, random_prompts, run_engine


def our_logits(path: str, prompt: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Logits of every position by our decoder, in one step."""
    spec = read_spec(path)
    options = EngineConfig(model_path=path, dtype=dtype, num_threads=1, max_model_len=MAX_LEN, max_num_seqs=MAX_LEN)
    config = resolve(options, spec, probe(options))
    buffers, model, cache = build_model(spec, config, start_threads(spec, config))
    row = StepRow(
        row=0,
        is_admission=True,
        request=greedy("a", prompt),
        output_ids=[],
        start=0,
        end=len(prompt),
        block_tables=[
            range(table * config.max_blocks_per_request, (table + 1) * config.max_blocks_per_request)
            for table in range(len(config.windows))
        ],
        samples=True,
    )
    batch = buffers.fill(StepPlan(step_id=1, rows=(row,)))
    sampled = buffers.whole().sampled[: len(prompt)]
    sampled[:] = torch.arange(len(prompt))
    return model.forward(replace(batch, sampled=sampled), cache).logits


def test_float32_logits_are_those_of_transformers(family: Checkpoint) -> None:
    prompt = random_prompts(2, longest=90)[1]
    torch.testing.assert_close(our_logits(family.path, prompt, "float32"), family.logits(prompt), atol=1e-3, rtol=1e-4)


def test_bfloat16_logits_err_no_more_than_those_of_transformers(family: Checkpoint) -> None:
    """Both round at every operation, in another order; the root mean square of the error is the same within a fifth."""
    prompt = random_prompts(2, longest=90)[1]
    exact = family.logits(prompt)
    theirs = (family.logits(prompt, torch.bfloat16) - exact).square().mean().sqrt()
    ours = (our_logits(family.path, prompt, "bfloat16") - exact).square().mean().sqrt()
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


@pytest.mark.parametrize("num_experts", [1, 2])
def test_a_token_may_meet_all_experts(num_experts: int, tmp_path: Path) -> None:
    model = make_model("qwen2-moe", num_experts=num_experts, num_experts_per_tok=num_experts)
    model.save_pretrained(tmp_path)
    ours = Checkpoint(path=str(tmp_path), model=model)
    engine = build_engine(EngineConfig(model_path=ours.path, dtype="float32", num_threads=1))
    prompt = random_prompts(2, longest=40)[1]
    assert run_engine(engine, [greedy("a", prompt)]) == {"a": ours.generate(prompt)}


def test_a_sharded_checkpoint_is_the_same_model(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    whole = checkpoint("qwen2")
    whole.model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    engine = build_engine(EngineConfig(model_path=str(tmp_path), dtype="float32", num_threads=1))
    prompt = random_prompts(2, longest=40)[1]
    assert run_engine(engine, [greedy("a", prompt)]) == {"a": whole.generate(prompt)}
