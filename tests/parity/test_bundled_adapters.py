"""The bundled adapters on the bundled model, with people's questions: what the engine answers is what peft answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from adapters.identity import AdapterRef
from adapters.registry import reference, reference_in, sub_folders
from engine.build import build_engine
from engine.config import EngineConfig
from engine.request import Request
from tests.parity.conftest import BUNDLED, emissions_of, greedy, run_engine

LIBRARY = BUNDLED.parents[1] / "adapters" / "library"
QUESTIONS = ("What does os.getcwd do?", "Explain json.dumps.", "math.sqrt?", "What is the capital of Peru?")
NUM_TOKENS = 40


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(BUNDLED)


def prompts(tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    conversations = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=False) for c in conversations]


def generate(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    with torch.inference_mode():
        ids = model.generate(
            input_ids=torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return ids[0, len(prompt) :].tolist()


def test_all_bundled_adapters_and_the_base_answer_in_one_batch_as_peft_does(tokenizer: PreTrainedTokenizerBase) -> None:
    refs = {name: reference_in(str(LIBRARY), name) for name in sub_folders(str(LIBRARY))}
    assert len(refs) == 3
    base = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
    expected = {f"base {i}": generate(base, prompt) for i, prompt in enumerate(prompts(tokenizer))}
    for name in refs:
        model = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32), LIBRARY / name
        ).eval()
        expected |= {f"{name} {i}": generate(model, prompt) for i, prompt in enumerate(prompts(tokenizer))}

    config = EngineConfig(model_path=str(BUNDLED), dtype="float32", num_threads=1, kv_cache_bytes=64 << 20)
    engine = build_engine(config, tuple(refs.values()))

    def request(name: str | None, index: int, prompt: list[int]) -> Request:
        return greedy(f"{name or 'base'} {index}", prompt, NUM_TOKENS, adapter=refs[name].digest if name else None)

    requests = [request(name, i, prompt) for i, prompt in enumerate(prompts(tokenizer)) for name in (None, *refs)]
    assert run_engine(engine, requests) == expected


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_lengths_of_columns_are_those_of_the_checkpoint_where_the_base_is_rounded(
    tokenizer: PreTrainedTokenizerBase, tmp_path: Path, quantization: str
) -> None:
    """DoRA was refused there. It is about as near to what it is on the whole numbers as the base is to itself."""
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32),
        LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=8, target_modules="all-linear", use_dora=True),
    )
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
        elif "magnitude" in name:
            parameter.data *= torch.empty_like(parameter).uniform_(0.5, 1.5)
    model.save_pretrained(tmp_path)
    ref = reference("dora", str(tmp_path))
    asked = [prompt[:length] for prompt in prompts(tokenizer) for length in (5, 8, 11)]
    far = {
        adapter: distance(chances(asked, None, adapter), chances(asked, quantization, adapter))
        for adapter in (None, ref)
    }
    effect = distance(chances(asked, None, ref), chances(asked, None, None))
    assert far[ref] < 3 * far[None]
    assert far[ref] < effect / 2


def chances(prompts: list[list[int]], quantization: str | None, adapter: AdapterRef | None) -> torch.Tensor:
    """Return the probabilities of the first token of each answer."""
    config = EngineConfig(
        model_path=str(BUNDLED), dtype="float32", num_threads=1, kv_cache_bytes=32 << 20, quantization=quantization
    )
    digest = None if adapter is None else adapter.digest
    requests = [greedy(str(i), prompt, 1, adapter=digest) for i, prompt in enumerate(prompts)]
    requests = [replace(r, params=replace(r.params, num_logprobs=1 << 20)) for r in requests]
    found = emissions_of(build_engine(config, [] if adapter is None else [adapter]), requests)
    entries = [emission.logprobs[0] for (emission,) in found.values()]
    return torch.tensor([[logprob for _, logprob in sorted(entry.top)] for entry in entries]).exp()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean total variation."""
    return float((one - other).abs().sum(dim=1).mean()) / 2
