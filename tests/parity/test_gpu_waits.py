"""While a GPU computes a step the host prepares the next: it waits for tokens, which it fetches, and nothing else.

That no kind of model makes it wait is told by the tests of its tokens (`tests.parity.gpu_parts.Replays.waits`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from adapters.registry import reference
from engine.build import build_engine
from engine.request import DryPenalty, LzPenalty, Pooling, Request
from tests.deployments.tiny_models import write_chat_model
from tests.parity.conftest import NEEDS_LATER, Checkpoint, greedy, made, random_prompts, run_engine, saved_once
from tests.parity.gpu_parts import HAS_GPU, STEPPING, Replays, config_of
from tests.parity.peft_adapters import save_adapters, saved_adapters
from tests.parity.test_states import MODELS as WITH_STATES
from tests.simulated_gpu.tensors import Gpu

pytestmark = pytest.mark.skipif(HAS_GPU, reason="only a simulated GPU tells who waits for it")
ALL = {"r": 4, "target_modules": "all-linear"}
OPTIONS: dict[str, dict[str, Any]] = {
    "drawn": {"temperature": 0.8, "seed": 3},
    "cut by the kernel": {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    "cut by operators": {"temperature": 0.8, "typical_p": 0.9, "xtc_probability": 0.5, "top_n_sigma": 2.0},
    "cut by thresholds": {"temperature": 0.8, "eta_cutoff": 0.001, "epsilon_cutoff": 0.001},
    "penalties": {"repetition_penalty": 1.1, "frequency_penalty": 0.1, "presence_penalty": 0.1},
    "repeats": {"dry": DryPenalty(multiplier=2.0, allowed_length=1), "lz": LzPenalty(strength=0.5)},
    "log-probabilities": {"num_logprobs": 3},
    "log-probabilities of the prompt": {"num_prompt_logprobs": 2},
    "biases": {"logit_bias": ((5, 1.0),)},
    "allowed tokens": {"allowed_token_ids": (1, 2, 3, 4)},
    "bad words": {"bad_words": ((1,), (2, 3))},
    "a delayed end": {"min_tokens": 3, "stop_token_ids": (7,)},
}


def waits_of(gpu: Gpu, engine: Any, requests: list[Request]) -> list[str]:
    """Return where the engine's thread has waited for the device, other than for tokens."""
    gpu.order.waits.clear()
    run_engine(engine, requests)
    return [wait for wait in gpu.order.waits if STEPPING in wait]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    simulated = Replays(monkeypatch).gpu
    assert simulated is not None
    return simulated


def test_for_no_option_of_a_request(shallow: Callable[[str], Checkpoint], gpu: Gpu) -> None:
    """Each by itself, for some change how others beside them are drawn; of prompts that are in no cache yet."""
    engine = build_engine(config_of(shallow("llama3").path))
    waits = {}
    for seed, (name, options) in enumerate(OPTIONS.items()):
        asked = [greedy(str(i), prompt, 4) for i, prompt in enumerate(random_prompts(2, longest=6, seed=seed))]
        asked = [replace(request, params=replace(request.params, **options)) for request in asked]
        if found := waits_of(gpu, engine, asked):
            waits[name] = found
    assert not waits


def test_for_no_grammar(tmp_path: Path, gpu: Gpu) -> None:
    matcher = pytest.importorskip("llguidance").LLMatcher
    engine = build_engine(config_of(str(write_chat_model(tmp_path / "chat"))))
    grammar = matcher.grammar_from_regex("[ab]forced[cd]")
    asked, plain = greedy("a", (5, 6, 7), 20), greedy("b", (9, 8), 4)
    asked = replace(asked, params=replace(asked.params, grammar=grammar, ignore_eos=False))
    assert waits_of(gpu, engine, [asked, plain]) == []


def test_for_no_vector(shallow: Callable[[str], Checkpoint], gpu: Gpu) -> None:
    engine = build_engine(config_of(shallow("llama3").path))
    asked = [
        replace(greedy(pooling.name, prompt, 1), pooling=pooling)
        for pooling, prompt in zip((Pooling.MEAN, Pooling.LAST), random_prompts(2, longest=20), strict=True)
    ]
    assert waits_of(gpu, engine, asked) == []


def test_for_no_adapter(shallow: Callable[[str], Checkpoint], tmp_path: Path, gpu: Gpu) -> None:
    """They are copied by another thread, on another stream."""
    family = shallow("llama3")
    adapters = saved_adapters(family.model, tmp_path, "everything", "both-ends", "norms", "embedding-dora")
    prompts = random_prompts(len(adapters), longest=12)
    asked = [greedy(str(i), p, 4, adapter=a.digest) for i, (p, a) in enumerate(zip(prompts, adapters, strict=True))]
    assert waits_of(gpu, build_engine(config_of(family.path), adapters), asked) == []


@NEEDS_LATER
def test_for_no_adapter_of_a_layer_with_states(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, gpu: Gpu
) -> None:
    """Which is called on the tokens of each row, beside others that decode in rows that are no neighbors."""
    saved = saved_once(lambda name: made(name, **WITH_STATES[name]), tmp_path_factory)("Lfm2ForCausalLM")
    adapters = [reference(*named) for named in save_adapters(saved.model, tmp_path, {"all": ALL}).items()]
    lengths = (7, 2, 7, 2)
    prompts = random_prompts(len(lengths), longest=20)
    asked = [
        greedy(str(i), prompt, length, adapter=adapters[0].digest if i else None)
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    config = replace(config_of(saved.path), max_num_seqs=3)
    assert waits_of(gpu, build_engine(config, adapters), asked) == []
