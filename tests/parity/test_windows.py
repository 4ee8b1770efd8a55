"""What windows have left behind is somebody else's: the tokens are those of transformers all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.build import build_engine
from engine.cache import reach
from tests.parity.conftest import VOCAB, Checkpoint, emissions_of, greedy, make_engine, make_model, run_engine
from tests.parity.gpu_parts import Replays, config_of

WINDOWED = ["ministral", "mistral-window", "qwen3-window", "gemma2", "gemma3", "olmo3", "phi3", "gpt-oss"]


def long_prompts(count: int, seed: int = 3) -> dict[str, tuple[int, ...]]:
    """Draw prompts far longer than the windows; every other one begins as the one before it."""
    generator = torch.Generator().manual_seed(seed)
    prompts: dict[str, tuple[int, ...]] = {}
    stem: tuple[int, ...] = ()
    for number in range(count):
        length = int(torch.randint(175, 230, (1,), generator=generator))
        drawn = tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist())
        prompts[str(number)] = stem[:60] + drawn[60:] if number % 2 else drawn
        stem = drawn
    return prompts


@pytest.mark.parametrize("kernels", ["own", "torch"])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_small_cache_serves_long_prompts_again_and_again(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str, kernels: str
) -> None:
    if kernels == "torch":
        monkeypatch.setattr("kernels.native.load", lambda: None)
    model = checkpoint(name)
    engine = make_engine(model, max_batched_tokens=48, kv_cache_bytes=512 * model.token_bytes, max_num_seqs=4)
    prompts = long_prompts(6)
    wanted = {number: model.generate(prompt) for number, prompt in prompts.items()}
    for _ in range(2):
        assert run_engine(engine, [greedy(number, prompt) for number, prompt in prompts.items()]) == wanted
    # What is cached behind a window that is there is used, and is right.
    last = "5"
    assert run_engine(engine, [greedy(last, prompts[last])]) == {last: wanted[last]}
    found = emissions_of(engine, [greedy("again", prompts[last])])["again"]
    assert found[0].num_cached_tokens == (len(prompts[last]) - 1) // 16 * 16
    assert [token_id for emission in found for token_id in emission.token_ids] == wanted[last]


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss"])
def test_requests_run_side_by_side_that_a_cache_of_all_they_had_could_not_hold(
    checkpoint: Callable[[str], Checkpoint], name: str
) -> None:
    model = checkpoint(name)
    engine = make_engine(model, max_batched_tokens=16, kv_cache_bytes=400 * model.token_bytes, block_tokens=4)
    prompts = {number: (*prompt, *prompt)[:220] for number, prompt in long_prompts(2).items()}
    side_by_side = 0
    wanted = {number: model.generate(prompt, 24) for number, prompt in prompts.items()}
    found: dict[str, list[int]] = {number: [] for number in prompts}
    for number, prompt in prompts.items():
        engine.add(greedy(number, prompt, 24))
    while any(len(found[number]) < 24 for number in prompts):
        for emission in engine.step():
            found[emission.request_id].extend(emission.token_ids)
        side_by_side = max(side_by_side, engine.snapshot().num_running)
    assert found == wanted
    assert side_by_side == 2
    assert engine.snapshot().counters.num_preemptions == 0


def test_so_it_is_by_the_kernels_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, and one with the same beginning, in blocks that the first has left."""
    # What float32 is read by; behind longer tiles the interpreter would take minutes.
    monkeypatch.setattr(reach, "TILE_TOKENS", 32)
    model = make_model("gemma3", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    model.save_pretrained(tmp_path)
    checkpoint, replays = Checkpoint(path=str(tmp_path), model=model), Replays(monkeypatch)
    config = replace(
        config_of(str(tmp_path)),
        max_model_len=96,
        max_num_seqs=1,
        max_batched_tokens=64,
        kv_cache_bytes=112 * checkpoint.token_bytes,
    )
    engine = build_engine(config)
    for prompt in long_prompts(2).values():
        found = run_engine(engine, [greedy("one", prompt[:75], 4)])
        assert found == {"one": checkpoint.generate(prompt[:75], 4)}
    assert replays.are_there
