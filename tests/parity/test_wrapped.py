"""Decoders in models that see, as transformers saves them now and before: what they say of texts, adapters included."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
    SmolVLMConfig,
    SmolVLMForConditionalGeneration,
)

from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from tests.parity.conftest import GEMMA, GEOMETRY, WINDOWS, Checkpoint, fill, greedy, random_prompts, run_engine
from tests.parity.peft_adapters import STACKS

SIGHT = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
GEMMA_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
QWEN_SIGHT = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8}
QWEN_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
MODELS: dict[str, tuple[type[PreTrainedModel], Any, str, dict[str, Any]]] = {
    "gemma3_text": (
        Gemma3ForConditionalGeneration,
        Gemma3Config,
        "siglip_vision_model",
        {**GEMMA, "layer_types": [*WINDOWS, "full_attention"], "rope_parameters": GEMMA_ROPE},
    ),
    "mistral": (Mistral3ForConditionalGeneration, Mistral3Config, "pixtral", {"head_dim": 24, "sliding_window": None}),
    "llama": (LlavaForConditionalGeneration, LlavaConfig, "clip_vision_model", {}),
    "qwen2": (LlavaForConditionalGeneration, LlavaConfig, "siglip_vision_model", {}),
    "qwen3": (LlavaForConditionalGeneration, LlavaConfig, "siglip_vision_model", {"head_dim": 16}),
    # By transformers, as no family has its queries' scales.
    "ministral3": (
        Mistral3ForConditionalGeneration,
        Mistral3Config,
        "pixtral",
        {"head_dim": 24, "rope_parameters": MINISTRAL_ROPE},
    ),
    "qwen2_vl_text": (
        Qwen2VLForConditionalGeneration,
        Qwen2VLConfig,
        "qwen2_vl_vision",
        {"rope_parameters": QWEN_ROPE, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2_5_vl_text": (
        Qwen2_5_VLForConditionalGeneration,
        Qwen2_5_VLConfig,
        "qwen2_5_vl_vision",
        {"rope_parameters": QWEN_ROPE},
    ),
    "qwen3_vl_text": (
        Qwen3VLForConditionalGeneration,
        Qwen3VLConfig,
        "qwen3_vl_vision",
        {"rope_parameters": QWEN_ROPE | {"mrope_interleaved": True}, "head_dim": 16},
    ),
    "qwen3_vl_moe_text": (
        Qwen3VLMoeForConditionalGeneration,
        Qwen3VLMoeConfig,
        "qwen3_vl_moe_vision",
        {"rope_parameters": QWEN_ROPE | {"mrope_interleaved": True}, "head_dim": 16} | QWEN_EXPERTS,
    ),
}
PEFT = {
    "r": 4,
    "lora_alpha": 6,
    "target_modules": r".*language_model\.layers\.\d+\.(self_attn\.[qv]|mlp\.down)_proj",
    "rank_pattern": {r"model\.language_model\.layers\.1\.mlp\.down_proj": 7},
}
OLD = {"model.language_model.": "language_model.model."}
"""How the decoder of such a model was called by transformers before 4.52, as adapters name it."""


def make_whole(text: str) -> PreTrainedModel:
    model_class, config_class, sight, options = MODELS[text]
    torch.manual_seed(11)
    told = {**GEOMETRY, **options, "model_type": text}
    config = config_class(
        text_config=told,
        vision_config={**(QWEN_SIGHT if "qwen" in sight else SIGHT), "model_type": sight},
        tie_word_embeddings=told["tie_word_embeddings"],
        image_token_index=GEOMETRY["vocab_size"] - 1,
    )
    return fill(model_class(config))


def make_smolvlm() -> PreTrainedModel:
    torch.manual_seed(11)
    config = SmolVLMConfig(text_config={**GEOMETRY, "model_type": "llama"}, vision_config=SIGHT)
    return fill(SmolVLMForConditionalGeneration(config))


OLD_PREFIXES = {"qwen2_vl_text": "model.layers.", "qwen2_5_vl_text": "model.layers."} | dict.fromkeys(
    ("qwen3_vl_text", "qwen3_vl_moe_text"), "model.language_model."
)


def assert_same(folder: Path, model: PreTrainedModel) -> None:
    whole = Checkpoint(path=str(folder), model=model)
    engine = build_engine(EngineConfig(model_path=whole.path, dtype="float32", num_threads=1))
    for prompt in random_prompts(3, longest=70):
        assert run_engine(engine, [greedy("a", prompt)]) == {"a": whole.generate(prompt)}


@pytest.mark.parametrize("text", MODELS)
@pytest.mark.parametrize("is_old", [True, False])
def test_the_text_of_a_model_that_sees_goes_on_as_transformers_has_it(tmp_path: Path, text: str, is_old: bool) -> None:
    model = make_whole(text)
    model.save_pretrained(tmp_path, save_original_format=is_old)
    names = load_file(tmp_path / "model.safetensors").keys()
    old = OLD_PREFIXES.get(text, "language_model.model.")
    assert any(name.startswith(old if is_old else "model.language_model.") for name in names)
    assert any("vision_tower." in name or "visual." in name for name in names)
    assert_same(tmp_path, model)


@pytest.mark.parametrize("text", ["qwen2_vl_text", "qwen2_5_vl_text"])
def test_the_fields_of_its_decoder_may_be_those_of_the_whole(tmp_path: Path, text: str) -> None:
    model = make_whole(text)
    model.save_pretrained(tmp_path, save_original_format=True)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    fields = config.pop("text_config")
    rope = fields.pop("rope_parameters")
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]}}
    path.write_text(json.dumps(fields | old | config))
    assert_same(tmp_path, model)


def test_experts_may_be_stored_in_either_order(tmp_path: Path) -> None:
    model = make_whole("qwen3_vl_moe_text")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    swapped = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor for name, tensor in tensors.items()
    }
    shape = swapped["model.language_model.layers.0.mlp.experts.down_proj"].shape
    assert shape == (4, QWEN_EXPERTS["moe_intermediate_size"], GEOMETRY["hidden_size"])
    save_file(swapped, path, {"format": "pt"})
    assert_same(tmp_path, model)


def save_adapter(base: PreTrainedModel, folder: Path, options: dict[str, Any]) -> PreTrainedModel:
    model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **options))
    torch.manual_seed(3)
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "modules_to_save" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    changed: PreTrainedModel = model.eval()
    return changed


def test_an_adapter_of_its_experts_is_what_it_is_to_peft(tmp_path: Path) -> None:
    text = "qwen3_vl_moe_text"
    make_whole(text).save_pretrained(tmp_path / "base")
    model = save_adapter(
        make_whole(text), tmp_path / "new", {"r": 3, "target_modules": [], "target_parameters": STACKS}
    )
    adapter = reference("new", str(tmp_path / "new"))
    engine = build_engine(EngineConfig(model_path=str(tmp_path / "base"), dtype="float32", num_threads=1), [adapter])
    prompt = random_prompts(2, longest=40)[1]
    expected = Checkpoint(path="new", model=model).generate(prompt)
    assert expected != Checkpoint(path="base", model=make_whole(text)).generate(prompt)
    assert run_engine(engine, [greedy("a", prompt, adapter=adapter.digest)]) == {"a": expected}


@pytest.mark.parametrize("text", ["gemma3_text", "mistral", "qwen2_5_vl_text", "qwen3_vl_text", "qwen3_vl_moe_text"])
def test_an_adapter_of_a_model_that_sees_is_what_it_is_to_peft(tmp_path: Path, text: str) -> None:
    make_whole(text).save_pretrained(tmp_path / "base")
    model = save_adapter(make_whole(text), tmp_path / "new", PEFT)
    paths = {"new": str(tmp_path / "new"), "old": renamed(tmp_path / "new", tmp_path / "old")}
    adapters = [reference(name, path) for name, path in paths.items()]
    engine = build_engine(EngineConfig(model_path=str(tmp_path / "base"), dtype="float32", num_threads=1), adapters)
    prompt = random_prompts(2, longest=40)[1]
    expected = Checkpoint(path=paths["new"], model=model).generate(prompt)
    assert expected != Checkpoint(path="base", model=make_whole(text)).generate(prompt)
    requests = [greedy(adapter.name, prompt, adapter=adapter.digest) for adapter in adapters]
    assert run_engine(engine, requests) == {"new": expected, "old": expected}


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (make_smolvlm, {"r": 4, "target_modules": r".*text_model\.layers.*(q|down)_proj", "use_dora": True}),
        (make_smolvlm, {"r": 4, "target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*(vision|connector).*"}),
        (partial(make_whole, "gemma3_text"), PEFT | {"modules_to_save": ["language_model.norm"]}),
        (partial(make_whole, "qwen2_5_vl_text"), PEFT | {"modules_to_save": ["model.language_model.norm"]}),
    ],
)
def test_an_adapter_may_have_its_own_names_for_modules(
    tmp_path: Path, make: Callable[[], PreTrainedModel], options: dict[str, Any]
) -> None:
    make().save_pretrained(tmp_path / "base")
    model = save_adapter(make(), tmp_path / "new", options)
    adapter = reference("new", str(tmp_path / "new"))
    engine = build_engine(EngineConfig(model_path=str(tmp_path / "base"), dtype="float32", num_threads=1), [adapter])
    prompt = random_prompts(2, longest=40)[1]
    expected = Checkpoint(path="new", model=model).generate(prompt)
    assert expected != Checkpoint(path="base", model=make()).generate(prompt)
    assert run_engine(engine, [greedy("a", prompt, adapter=adapter.digest)]) == {"a": expected}


def renamed(source: Path, folder: Path) -> str:
    """Write an adapter as it would be of a model whose decoder was called otherwise."""
    ((now, before),) = OLD.items()
    folder.mkdir()
    tensors = load_file(source / "adapter_model.safetensors")
    assert all(now in name for name in tensors)
    save_file({name.replace(now, before): t for name, t in tensors.items()}, folder / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    config["target_modules"] = config["target_modules"].replace(r"language_model\.", r"language_model\.model\.")
    config["rank_pattern"] = {r"language_model\.model\.layers\.1\.mlp\.down_proj": 7}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
