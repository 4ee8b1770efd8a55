"""Adapters that were trained where projections were one module over bases where they are several, and the reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import peft
import pytest
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from tests.parity.conftest import GEOMETRY, Checkpoint, greedy, make_model, random_prompts, run_engine
from tests.parity.peft_adapters import CONFIGS, FUSED, save_beyond_products

SPLIT = {
    "everything": CONFIGS["everything"],
    "lora-bias": {"r": 4, "lora_alpha": 6, "target_modules": ["v_proj", "up_proj"], "lora_bias": True},
    "dora": {"r": 5, "lora_alpha": 10, "target_modules": "all-linear", "use_dora": True},
}
WHOLE = {name: FUSED[name] for name in ("fused", "fused-lora-bias", "fused-dora")}


def joined() -> PreTrainedModel:
    return make_model("phi3", sliding_window=None)


def taken_apart() -> PreTrainedModel:
    """The same model, by Llama's names."""
    source = joined()
    config = source.config
    tensors = {}
    for name, tensor in source.state_dict().items():
        if name.endswith("qkv_proj.weight"):
            dim = config.hidden_size // config.num_attention_heads
            sizes = [config.num_attention_heads * dim, *[config.num_key_value_heads * dim] * 2]
            parts = zip(("q_proj", "k_proj", "v_proj"), tensor.split(sizes), strict=True)
            tensors |= {name.replace("qkv_proj", part): rows for part, rows in parts}
        elif name.endswith("gate_up_proj.weight"):
            parts = zip(("gate_proj", "up_proj"), tensor.chunk(2), strict=True)
            tensors |= {name.replace("gate_up_proj", part): rows for part, rows in parts}
        else:
            tensors[name] = tensor
    model = LlamaForCausalLM(LlamaConfig(**GEOMETRY, rms_norm_eps=config.rms_norm_eps)).float().eval()
    model.load_state_dict(tensors)
    return model


FORMS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], PreTrainedModel], dict[str, dict[str, object]]]] = {
    "apart over one": (taken_apart, joined, SPLIT),
    "one over parts": (joined, taken_apart, WHOLE),
}


@pytest.mark.parametrize("form", FORMS)
def test_they_generate_what_peft_generates_on_the_base_that_they_were_made_for(tmp_path: Path, form: str) -> None:
    """Parts become one, or one parts, before any kernels lay them out: those that the CPU has tell of all."""
    made_for, served, configs = FORMS[form]
    path_by_name = save_beyond_products(made_for, tmp_path, configs)
    served().save_pretrained(tmp_path / "base")
    adapters = [reference(name, path) for name, path in path_by_name.items()]
    prompts = random_prompts(len(adapters) + 1, longest=24)
    requests, expected = [greedy("base", prompts[-1])], {}
    model = made_for()
    expected["base"] = Checkpoint(path=str(tmp_path), model=model).generate(prompts[-1])
    for adapter, prompt in zip(adapters, prompts[:-1], strict=True):
        model = peft.PeftModel.from_pretrained(made_for(), path_by_name[adapter.name]).eval()
        expected[adapter.name] = Checkpoint(path=path_by_name[adapter.name], model=model).generate(prompt)
        requests.append(greedy(adapter.name, prompt, adapter=adapter.digest))
    config = EngineConfig(model_path=str(tmp_path / "base"), dtype="float32", num_threads=1)
    assert run_engine(build_engine(config, adapters), requests) == expected
