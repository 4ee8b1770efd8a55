"""Models with layers that keep a state instead of keys: transformers' own tokens, whatever a step mixes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from transformers import PreTrainedModel

from adapters.registry import reference
from engine.build import build_engine
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.loading.spec import read_model_spec
from tests.parity.conftest import (
    GEOMETRY,
    NEEDS_LATER,
    Checkpoint,
    fill,
    greedy,
    made,
    random_prompts,
    run_engine,
    saved_once,
)
from tests.parity.gpu_parts import Replays
from tests.parity.test_fallback import GEMMA4, config_of

pytestmark = NEEDS_LATER

DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
}
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": DELTA,
    "Qwen3_5MoeForCausalLM": {**DELTA, **EXPERTS},
    "Qwen3NextForCausalLM": {**DELTA, **EXPERTS},
    "OlmoHybridForCausalLM": DELTA,
    "Lfm2ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "Lfm3ForCausalLM": {"layer_types": ["conv", "full_attention", "conv"]},
    "GraniteMoeHybridForCausalLM": {
        **MAMBA,
        "layer_types": ["mamba", "attention", "mamba"],
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
    },
    "BambaForCausalLM": {**MAMBA, "attn_layer_indices": [1]},
    "FalconH1ForCausalLM": {**MAMBA, "mamba_d_ssm": 128},
    "NemotronHForCausalLM": {
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 1,
        "chunk_size": 16,
        "layers_block_type": ["mamba", "attention", "mlp"],
    },
}
JAMBA = {
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "num_experts": 2,
    "mamba_d_state": 8,
    "mamba_dt_rank": 8,
}
FEW = ("Qwen3_5MoeForCausalLM", "FalconH1ForCausalLM", "Lfm2ForCausalLM")
"""One of each kind of layer that keeps states."""
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Give the checkpoint of an architecture, made at the first call."""

    return saved_once(make, tmp_path_factory)


def make(name: str) -> PreTrainedModel:
    return made(name, **(MODELS | {"JambaForCausalLM": JAMBA})[name])


def engine_of(checkpoint: Checkpoint, **options: Any) -> Engine:
    return build_engine(config_of(checkpoint.path, **options))


def check(
    checkpoint: Checkpoint, prompts: Sequence[tuple[int, ...]], num_tokens: int = NUM_TOKENS, **options: Any
) -> Engine:
    """Compare an engine's tokens with transformers'; return it."""
    engine = engine_of(checkpoint, **options)
    found = run_engine(engine, [greedy(str(i), prompt, num_tokens) for i, prompt in enumerate(prompts)])
    assert found == {str(i): checkpoint.generate(prompt, num_tokens) for i, prompt in enumerate(prompts)}
    return engine


@pytest.mark.parametrize("name", MODELS)
def test_a_mixed_batch_gets_the_tokens_of_transformers(saved: Callable[[str], Checkpoint], name: str) -> None:
    check(saved(name), random_prompts(6, longest=60))


@pytest.mark.parametrize("name", MODELS)
def test_prompts_in_chunks_go_on_from_their_states(saved: Callable[[str], Checkpoint], name: str) -> None:
    check(saved(name), random_prompts(6, longest=60), max_batched_tokens=7, max_num_seqs=7)


def test_a_row_begins_anew_for_each_request_that_gets_it(saved: Callable[[str], Checkpoint]) -> None:
    check(saved("Qwen3_5ForCausalLM"), random_prompts(9, longest=60), max_num_seqs=2)


def test_who_had_to_give_way_computes_its_state_again(saved: Callable[[str], Checkpoint]) -> None:
    prompts = [prompt * 20 for prompt in random_prompts(1, longest=60)] * 3
    sizes = {"block_tokens": 16, "max_model_len": 64, "kv_cache_bytes": 7 * 16 * 2 * 2 * 16 * 4}
    engine = check(saved("Qwen3_5ForCausalLM"), prompts, 40, **sizes)
    assert engine.snapshot().counters.num_preemptions > 0


def test_where_no_state_is_kept_the_same_beginning_is_computed_again(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint, prompt = saved("Lfm2ForCausalLM"), (5, 6, 7, 8) * 12
    engine = check(checkpoint, [prompt, prompt], max_num_seqs=1, state_cache_bytes=0)
    assert not engine.config.enable_prefix_cache


def test_nothing_is_guessed_and_nothing_is_stored_below(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint = saved("Lfm2ForCausalLM")
    assert engine_of(checkpoint).config.num_speculative_tokens == 0
    with pytest.raises(ConfigError, match=r"num_speculative_tokens: 4, but this model has recurrent layers"):
        engine_of(checkpoint, num_speculative_tokens=4)
    with pytest.raises(ConfigError, match=r"kv_disk_bytes: .*recurrent states"):
        engine_of(checkpoint, kv_disk_bytes=1 << 30)


def test_a_model_that_cannot_go_on_with_several_tokens_is_refused(saved: Callable[[str], Checkpoint]) -> None:
    """As transformers has Jamba: more than one token at once begin from no state."""
    with pytest.raises(CheckpointError, match=r"prompt in chunks, its logits differ"):
        engine_of(saved("JambaForCausalLM"))


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.thorough) for name in MODELS]
)
def test_the_kernels_of_a_gpu_keep_the_states_of_rows_and_attend(
    saved: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Recorded steps find the states of their rows by themselves."""
    replays = Replays(monkeypatch)
    sizes = {"kv_cache_bytes": 1 << 22, "max_num_seqs": 4, "max_batched_tokens": 16}
    check(saved(name), random_prompts(3, longest=30), num_tokens=4, **sizes, device="cuda")
    assert replays.are_there
    assert replays.waits == []


def test_states_take_memory_of_the_cache(saved: Callable[[str], Checkpoint]) -> None:
    spec = read_model_spec(saved("Qwen3_5ForCausalLM").path)
    # In three layers the last four inputs of 64 + 32 + 32 channels, and four heads' matrices of 16 by 16.
    assert spec.state_bytes(2) == 3 * (4 * 128 * 2 + 4 * 16 * 16 * 4)
    assert spec.num_layers == 1
    assert spec.num_model_layers() == 4


# PEFT takes no adapter of `out_proj` for some, and for one counts a router that is no linear module among all of them.
SOME = {
    "FalconH1ForCausalLM": ["in_proj", "q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "NemotronHForCausalLM": ["in_proj", "q_proj", "o_proj", "down_proj"],
    "Qwen3NextForCausalLM": ["in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}


@pytest.mark.parametrize("name", MODELS)
def test_adapters_of_all_linear_modules_are_added(
    saved: Callable[[str], Checkpoint], tmp_path: Path, name: str
) -> None:
    """Those of recurrent layers too, which see the tokens of one request after the other."""
    check_adapters(saved(name), tmp_path, name)


@pytest.mark.parametrize(
    "name", ["Lfm2ForCausalLM", *(pytest.param(name, marks=pytest.mark.thorough) for name in FEW[:-1])]
)
def test_so_they_are_by_the_kernels_of_a_gpu(
    saved: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    replays = Replays(monkeypatch)
    sizes = {"kv_cache_bytes": 1 << 22, "max_num_seqs": 4, "max_batched_tokens": 16, "max_adapter_rank": 16}
    check_adapters(saved(name), tmp_path, name, **sizes, device="cuda")
    assert replays.are_there
    assert replays.waits == []


def check_adapters(base: Checkpoint, folder: Path, name: str, **options: Any) -> None:
    """Compare the tokens of two adapters and the base, side by side and mixed with prompts, with peft's."""
    expected, requests, adapters = {}, [], []
    prompts = random_prompts(3, longest=40)
    for index, (rank, prompt) in enumerate(zip((4, 7), prompts[1:], strict=True)):
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=rank, target_modules=SOME.get(name, "all-linear"))
        model = peft.get_peft_model(make(name), config)
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(parameter, std=0.3)
        path = folder / str(index)
        model.save_pretrained(path)
        adapters.append(reference(str(index), str(path)))
        expected[str(index)] = Checkpoint(path=str(path), model=model.eval()).generate(prompt, NUM_TOKENS)
        requests.append(greedy(str(index), prompt, NUM_TOKENS, adapter=adapters[-1].digest))
    engine = build_engine(config_of(base.path, **options), adapters)
    found = run_engine(engine, [*requests, greedy("base", prompts[0], NUM_TOKENS)])
    assert found == expected | {"base": base.generate(prompts[0], NUM_TOKENS)}


SIGHT = {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Qwen3_5ForConditionalGeneration", DELTA),
        ("Qwen3_5MoeForConditionalGeneration", {**DELTA, **EXPERTS}),
        ("Gemma4ForConditionalGeneration", {**GEMMA4, "pad_token_id": 0, "tie_word_embeddings": True}),
        ("SmolVLMForConditionalGeneration", {"model_type": "llama"}),
    ],
)
def test_of_a_model_that_sees_the_part_for_text_is_served(tmp_path: Path, name: str, text: dict[str, Any]) -> None:
    model_class = getattr(transformers, name)
    config = model_class.config_class(text_config={**GEOMETRY, **text}, vision_config=SIGHT)
    torch.manual_seed(11)
    model = fill(model_class(config))
    model.save_pretrained(tmp_path)
    check(Checkpoint(path=str(tmp_path), model=model), random_prompts(4, longest=60))
