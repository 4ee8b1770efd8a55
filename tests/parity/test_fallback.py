"""Architectures that have no family of ours: transformers computes them over our cache, with its own tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from adapters.registry import reference
from engine import build
from engine.build import build_engine
from engine.config import EngineConfig
from engine.fallback import experts
from engine.gpu.build import gpu_parts
from engine.gpu.model import GpuModel
from engine.gpu.runtime import CudaRuntime
from engine.loading.checkpoint import load_parameters
from engine.loading.spec import read_model_spec
from engine.request import Pooling
from kernels.streamed_linear.reference import from_int4, to_int4
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
from tests.parity.gpu_parts import HAS_GPU, Replays, an_fp8_gpu
from tests.parity.peft_adapters import save_adapters
from tests.parity.test_pooling import assert_same, vector_request, vectors_of

OLD_NAMES = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
# Layers of two kinds have heads of two lengths and widths, and the longer ones one head of keys.
GEMMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "global_head_dim": 48,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "vocab_size_per_layer_input": GEOMETRY["vocab_size"],
}
MODELS: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {},
    "CohereForCausalLM": {},
    "Cohere2ForCausalLM": {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "Ernie4_5ForCausalLM": {"head_dim": 16},
    "Exaone4ForCausalLM": {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    "GPT2LMHeadModel": OLD_NAMES,
    "GPTNeoXForCausalLM": {},
    "Gemma4ForCausalLM": GEMMA4
    | {"use_double_wide_mlp": True, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "Glm4ForCausalLM": {"head_dim": 16},
    "Glm4MoeForCausalLM": {"head_dim": 16, "n_routed_experts": 8, **EXPERTS},
    "DeepseekV3ForCausalLM": {**LATENT, **EXPERTS, "n_routed_experts": 8, "first_k_dense_replace": 1},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "MiniCPM3ForCausalLM": LATENT,
    "ModernBertDecoderForCausalLM": {"bos_token_id": 1, "cls_token_id": 1, "pad_token_id": 0},
    "NemotronForCausalLM": {},
    "OPTForCausalLM": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "PhiForCausalLM": {},
    "SeedOssForCausalLM": {"head_dim": 16},
    "StableLmForCausalLM": {},
    "Starcoder2ForCausalLM": {"sliding_window": 20},
}
NUM_TOKENS = 8
GPU_OPTIONS: dict[str, Any] = {
    "kv_cache_bytes": 1 << 22,
    "max_num_seqs": 4,
    "max_batched_tokens": 16,
    "max_adapter_rank": 16,
    "device": "cuda",
}


def make(name: str, **overrides: Any) -> PreTrainedModel:
    return made(name, **{**MODELS[name], **overrides})


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Give the checkpoint of an architecture, made at the first call."""

    return saved_once(make, tmp_path_factory)


def config_of(path: str, **options: Any) -> EngineConfig:
    return EngineConfig(model_path=path, **dict[str, Any](device="cpu", dtype="float32", num_threads=1) | options)


CHUNKS = {"max_batched_tokens": 7, "max_num_seqs": 7}
IN_CHUNKS = (
    "Cohere2ForCausalLM",
    "Gemma4ForCausalLM",
    "DeepseekV3ForCausalLM",
    "GPT2LMHeadModel",
    "ModernBertDecoderForCausalLM",
)


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in MODELS), *((name, CHUNKS) for name in IN_CHUNKS)]
)
def test_a_mixed_batch_gets_the_tokens_of_transformers(
    saved: Callable[[str], Checkpoint], name: str, options: dict[str, int]
) -> None:
    checkpoint = saved(name)
    prompts = random_prompts(6, longest=60)
    found = run_engine(
        build_engine(config_of(checkpoint.path, **options)),
        [greedy(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)],
    )
    assert found == {str(i): checkpoint.generate(prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)}


LEFT_OVER = {
    "Glm4MoeForCausalLM": {"model.layers.3.eh_proj.weight": (64, 128), "model.layers.3.enorm.weight": (64,)},
    "GPT2LMHeadModel": {"transformer.h.0.attn.masked_bias": ()},
}
"""Tensors that transformers only warns of, by the model that may have them: a layer that drafts, a constant."""


@pytest.mark.parametrize("name", LEFT_OVER)
def test_tensors_that_change_no_token_may_be_left_over(tmp_path: Path, name: str) -> None:
    model = make(name)
    model.save_pretrained(tmp_path)
    more = {tensor: torch.ones(shape) for tensor, shape in LEFT_OVER[name].items()}
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), **more}, path, {"format": "pt"})
    prompt = random_prompts(2, longest=40)[1]
    found = run_engine(build_engine(config_of(str(tmp_path))), [greedy("a", prompt, NUM_TOKENS)])
    assert found == {"a": Checkpoint(path=str(tmp_path), model=model).generate(prompt, NUM_TOKENS)}


def test_experts_beside_an_mlp_over_heads_of_two_lengths(tmp_path: Path) -> None:
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32}
    model = make("Gemma4ForCausalLM", **GEMMA4, **experts, use_double_wide_mlp=False)
    model.save_pretrained(tmp_path)
    prompts = random_prompts(4, longest=40)
    requests = [greedy(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    checkpoint = Checkpoint(path=str(tmp_path), model=model)
    assert run_engine(build_engine(config_of(checkpoint.path)), requests) == {
        str(i): checkpoint.generate(prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)
    }


def test_yarn_serves_texts_beyond_the_context_that_config_json_names(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    model = make("Glm4ForCausalLM", max_position_embeddings=32, rope_parameters={**rope, "partial_rotary_factor": 0.5})
    model.save_pretrained(tmp_path)
    prompt = random_prompts(2, longest=100)[1]
    found = run_engine(build_engine(config_of(str(tmp_path))), [greedy("a", prompt, NUM_TOKENS)])
    assert found == {"a": Checkpoint(path=str(tmp_path), model=model).generate(prompt, NUM_TOKENS)}


PHI_MOE_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + i / 10 for i in range(8)],
    "long_factor": [3.0] * 8,
    "short_mscale": 1.25,
    "long_mscale": 1.5,
    "original_max_position_embeddings": 100,
}
"""As all published ones have it. Their trace failed: the rotary embedding compares lengths, which have no data."""
OTHER_CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "PhiMoEForCausalLM": ("phimoe", {"num_local_experts": 4, "rope_parameters": PHI_MOE_ROPE}),
    "ExaoneForCausalLM": ("exaone", {}),
    "InternLM3ForCausalLM": ("internlm3", {"head_dim": 16}),
    "SarvamMoEForCausalLM": ("sarvam_moe", {"head_dim": 16, "n_routed_experts": 8, **EXPERTS}),
}
"""By the class in a checkpoint's own code: the type of its configuration, for which transformers has another class."""


@pytest.mark.parametrize("is_resaved", [False, True], ids=["as_published", "as_transformers_saves_it"])
@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_what_transformers_computes_under_another_name_is_served(tmp_path: Path, name: str, is_resaved: bool) -> None:
    """EXAONE 3 saved again was refused: its tensors have other names than a Llama's, and config.json names code."""
    kind, fields = OTHER_CLASSES[name]
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    torch.manual_seed(12)
    model = fill(AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**GEOMETRY | fields)))
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    own = {"auto_map": {"AutoModelForCausalLM": f"modeling_{kind}.{name}"}}
    own |= {} if is_resaved else {"architectures": [name]}
    path.write_text(json.dumps(json.loads(path.read_text()) | own))
    prompt = random_prompts(2, longest=40)[1]
    found = run_engine(build_engine(config_of(str(tmp_path))), [greedy("a", prompt, NUM_TOKENS)])
    assert found == {"a": Checkpoint(path=str(tmp_path), model=model).generate(prompt, NUM_TOKENS)}


def check_adapters(base: Checkpoint, name: str, path_by_name: dict[str, str], **options: Any) -> None:
    adapters = [reference(adapter, path) for adapter, path in path_by_name.items()]
    prompts = random_prompts(len(adapters) + 1, longest=20)
    expected = {"base": base.generate(prompts[-1], NUM_TOKENS)}
    requests = [greedy("base", prompts[-1], NUM_TOKENS)]
    for adapter, prompt in zip(adapters, prompts[:-1], strict=True):
        model = peft.PeftModel.from_pretrained(make(name), path_by_name[adapter.name]).eval()
        one = Checkpoint(path=f"{base.path}/{adapter.name}", model=model)
        expected[adapter.name] = one.generate(prompt, NUM_TOKENS)
        requests.append(greedy(adapter.name, prompt, NUM_TOKENS, adapter=adapter.digest))
    assert run_engine(build_engine(config_of(base.path, **options), adapters), requests) == expected


OTHER_TARGETS = {
    "ApertusForCausalLM": "all-linear",
    "DeepseekV3ForCausalLM": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "MiniCPM3ForCausalLM": "all-linear",
    "PhiForCausalLM": "all-linear",
    "Starcoder2ForCausalLM": "all-linear",
}
"""Modules that no family of ours has: of latent attention, of MLPs without a gate, under other names."""


@pytest.mark.parametrize("name", OTHER_TARGETS)
def test_adapters_of_any_linear_module_generate_what_peft_generates(
    saved: Callable[[str], Checkpoint], tmp_path: Path, name: str
) -> None:
    config = {"r": 4, "lora_alpha": 8, "target_modules": OTHER_TARGETS[name]}
    configs = {"plain": config}
    if OTHER_TARGETS[name] == "all-linear":
        configs["dora"] = config | {"use_dora": True}
    check_adapters(saved(name), name, save_adapters(make(name), tmp_path, configs))


OF_EXPERTS = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}
"""Which for current versions of PEFT are an attention module's and the experts'."""


@NEEDS_LATER
@pytest.mark.parametrize("name", ["Glm4MoeForCausalLM", "DeepseekV3ForCausalLM"])
def test_adapters_of_experts_generate_what_peft_generates(
    saved: Callable[[str], Checkpoint], tmp_path: Path, name: str
) -> None:
    config = OF_EXPERTS | ({"target_modules": ["o_proj", *OF_EXPERTS["target_modules"][1:]]} if "Deep" in name else {})
    check_adapters(saved(name), name, save_adapters(make(name), tmp_path, {"experts": config}))


@pytest.mark.parametrize("name", ["SeedOssForCausalLM", "Exaone4ForCausalLM"])
def test_adapters_generate_what_peft_generates(saved: Callable[[str], Checkpoint], tmp_path: Path, name: str) -> None:
    check_adapters(saved(name), name, save_adapters(make(name), tmp_path))


def test_a_gate_and_what_it_gates_may_be_one_module(saved: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    name, targets = "Glm4ForCausalLM", ["q_proj", "gate_up_proj", "down_proj"]
    model = peft.get_peft_model(make(name), peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets))
    for key, parameter in model.named_parameters():
        if "lora_B" in key:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(tmp_path)
    check_adapters(saved(name), name, {"fused": str(tmp_path)})


@pytest.mark.parametrize(
    "name",
    [
        "Gemma4ForCausalLM",
        "MiniCPM3ForCausalLM",
        pytest.param("Glm4MoeForCausalLM", marks=NEEDS_LATER),
    ],
)
def test_the_kernels_of_a_gpu_attend_for_it_and_add_its_adapters(
    saved: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Prompts by launches, answers by replays of recorded steps."""
    replays, checkpoint = Replays(monkeypatch), saved(name)
    if name == "Glm4MoeForCausalLM":
        check_adapters(checkpoint, name, save_adapters(make(name), tmp_path, {"experts": OF_EXPERTS}), **GPU_OPTIONS)
    else:
        check_on_a_gpu(checkpoint)
    assert replays.are_there
    assert replays.waits == []


def test_recordings_share_one_buffer_for_logits_that_a_model_scales(
    saved: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or each would keep memory of its own: gigabytes, of a large vocabulary."""
    Replays(monkeypatch)
    config = config_of(saved("Cohere2ForCausalLM").path, **GPU_OPTIONS)
    spec, hardware = read_model_spec(config.model_path), build.probe(config)
    model = gpu_parts(config, spec, hardware, load_parameters, CudaRuntime(torch.device("cuda"))).model
    assert isinstance(model, GpuModel)
    recorded = list(model._recorded.values())
    assert len(recorded) > 3
    assert len({logits.data_ptr() for _, logits in recorded}) == 1


def test_a_gpu_rounds_what_divides_into_groups_and_leaves_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear products and experts of four bits; of a router and of inputs that are too few for a group, numbers."""
    few = {"num_hidden_layers": 2, "n_routed_experts": 4, "head_dim": 32}
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 192}
    model = make("Glm4MoeForCausalLM", **few, **wide)
    model.save_pretrained(tmp_path)
    num_rounded = 0
    for name, weight in model.named_parameters():
        if "_proj" in name and weight.dim() > 1 and weight.shape[-1] % 128 == 0:
            weight.data = from_int4(to_int4(weight.data.half().flatten(0, -2))).float().view_as(weight)
            num_rounded += 1
    assert num_rounded == 2 * 4 + 2 + (2 + 3)
    options = {**GPU_OPTIONS, "dtype": "float16", "quantization": "int4"}
    prompts = random_prompts(2, longest=8)
    requests = [greedy(str(i), prompt, 4) for i, prompt in enumerate(prompts)]
    with an_fp8_gpu(monkeypatch):
        found = run_engine(build_engine(config_of(str(tmp_path), **options)), requests)
    rounded = Checkpoint(path=str(tmp_path), model=model)
    assert found == {str(i): rounded.generate(prompt, 4) for i, prompt in enumerate(prompts)}


@pytest.mark.skipif(HAS_GPU, reason="only a stand-in counts what is recorded")
def test_a_model_that_waits_for_its_device_is_not_recorded(
    saved: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with the experts of transformers itself, which asks which of them have rows."""
    monkeypatch.setattr(experts, "activation_of", lambda module: None)
    replays = Replays(monkeypatch)
    check_on_a_gpu(saved("Glm4MoeForCausalLM"))
    assert not replays.are_there


def check_on_a_gpu(checkpoint: Checkpoint) -> None:
    prompts = random_prompts(3, longest=30)
    requests = [greedy(str(i), prompt, 4) for i, prompt in enumerate(prompts)]
    found = run_engine(build_engine(config_of(checkpoint.path, **GPU_OPTIONS)), requests)
    assert found == {str(i): checkpoint.generate(prompt, 4) for i, prompt in enumerate(prompts)}


def test_a_module_of_another_type_than_the_model_is_computed_in_its_own(saved: Callable[[str], Checkpoint]) -> None:
    checkpoint = saved("HunYuanMoEV1ForCausalLM")
    config = replace(config_of(checkpoint.path), dtype="bfloat16")
    assert len(run_engine(build_engine(config), [greedy("a", (1, 2, 3), NUM_TOKENS)])["a"]) == NUM_TOKENS


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "ModernBertDecoderForCausalLM", "OPTForCausalLM"])
def test_vectors_are_those_behind_the_last_norm(saved: Callable[[str], Checkpoint], name: str) -> None:
    checkpoint, prompt = saved(name), random_prompts(2, longest=20)[1]
    requests = [vector_request("vector", prompt, Pooling.MEAN), greedy("text", prompt, NUM_TOKENS)]
    found = vectors_of(build_engine(config_of(checkpoint.path)), requests)["vector"]
    with torch.no_grad():
        states = checkpoint.model.base_model(torch.tensor([prompt])).last_hidden_state[0]
    assert_same(found, np.asarray(states.mean(0)))
