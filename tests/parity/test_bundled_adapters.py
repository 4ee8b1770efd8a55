"""The bundled adapters on the bundled model, with people's questions: what the engine answers is what peft answers."""

from __future__ import annotations

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from adapters.registry import reference_in, sub_folders
from engine.build import build_engine
from engine.config import EngineConfig
from engine.request import Request
from tests.parity.conftest import BUNDLED, greedy, run_engine

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
