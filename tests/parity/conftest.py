"""The bundled model and random checkpoints of every family, and a way to run an engine over requests.

Random weights are drawn wide and biases are not zero: logits lie far apart, so that equal mathematics gives equal
tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.request import Emission, FinishReason, Request, RequestId, SamplingParams
from tests.simulated_gpu.device import in_order

BUNDLED = Path(__file__).parents[2] / "models" / "stdlib-chat"
VOCAB = 300
MAX_LEN = 256
NUM_TOKENS = 12
PATIENCE_S = 600.0
NEEDS_LATER = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason=f"transformers {transformers.__version__} is older than what pyproject.toml asks for",
)
"""Recurrent states and adapters of experts of models that transformers computes; an older one has all the others."""

GEOMETRY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 20, "tie_word_embeddings": True}
OLMO_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    "full_attention": {**LLAMA3_ROPE, "rope_type": "yarn", "rope_theta": 500000.0},
}
PHI_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(12)],
    "long_factor": [9.0] * 12,
}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.5,
}
WINDOWS = ["sliding_attention"] * 2
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any, dict[str, Any]]] = {
    "llama2": (LlamaForCausalLM, LlamaConfig, {"num_key_value_heads": 4}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-with-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 24, "sliding_window": None}),
    "ministral": (
        MinistralForCausalLM,
        MinistralConfig,
        {"head_dim": 32, "sliding_window": 20, "layer_types": [*WINDOWS, "full_attention"]},
    ),
    "mistral-window": (MistralForCausalLM, MistralConfig, {"sliding_window": 24}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "qwen3-window": (
        Qwen3ForCausalLM,
        Qwen3Config,
        {"head_dim": 32, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "gemma2": (
        Gemma2ForCausalLM,
        Gemma2Config,
        {**GEMMA, "attn_logit_softcapping": 4.0, "final_logit_softcapping": 20.0},
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, {**GEMMA, "layer_types": [*WINDOWS, "full_attention"]}),
    "granite": (GraniteForCausalLM, GraniteConfig, GRANITE),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config, {}),
    "olmo3": (
        Olmo3ForCausalLM,
        Olmo3Config,
        {"sliding_window": 20, "layer_types": [*WINDOWS, "full_attention"], "rope_parameters": OLMO_ROPE},
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config, {"sliding_window": 20}),
    "phi3-partial": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 4 * MAX_LEN,
            "original_max_position_embeddings": MAX_LEN,
            "rope_parameters": PHI_ROPE,
        },
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, {"no_rope_layers": [1, 0, 1]}),
    "mixtral": (MixtralForCausalLM, MixtralConfig, {"num_local_experts": 4}),
    "olmoe": (OlmoeForCausalLM, OlmoeConfig, {"num_experts": 7, "num_experts_per_tok": 3}),
    "qwen2-moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig,
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
            "decoder_sparse_step": 2,
        },
    ),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {
            "head_dim": 32,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "granite-moe": (GraniteMoeForCausalLM, GraniteMoeConfig, {**GRANITE, "num_local_experts": 5}),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "head_dim": 32,
            "sliding_window": 20,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "rope_parameters": {**LLAMA3_ROPE, "rope_type": "yarn", "rope_theta": 150000.0, "truncate": False},
        },
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A folder, the model that transformers saved there, and what that model generates."""

    path: str
    model: PreTrainedModel

    @cache  # noqa: B019  (lives as long as the session)
    def generate(self, prompt: tuple[int, ...], num_tokens: int = NUM_TOKENS) -> list[int]:
        """Greedy continuation by transformers."""
        with torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        continuation: list[int] = ids[0, len(prompt) :].tolist()
        return continuation

    def logits(self, prompt: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Logits of every position by transformers, float32 [tokens, vocab]."""
        attention = self.model.config._attn_implementation
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype, attn_implementation=attention).eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([list(prompt)])).logits[0].float()
        return logits

    @property
    def token_bytes(self) -> int:
        """What the keys and values of a token take in all layers, in float32."""
        config = self.model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * 4)

    def __hash__(self) -> int:
        return hash(self.path)


def make_model(family: str, **overrides: Any) -> PreTrainedModel:
    """Build a tiny model of a family with random weights, always the same."""
    model_class, config_class, options = FAMILIES[family]
    torch.manual_seed(11)
    model = fill(model_class(config_class(**{**GEOMETRY, **options, **overrides})))
    if getattr(model.config, "attn_logit_softcapping", None):
        # What transformers 5.17 takes otherwise, torch's own attention, leaves the cap out.
        model.set_attn_implementation("eager")
    return model


def fill(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model the weights that the generator draws next."""
    model = model.float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.25)
            elif "norm" in name:
                parameter.normal_(1, 0.1)
            else:
                parameter.normal_(0, 0.2)
    return model


def made(name: str, **fields: Any) -> PreTrainedModel:
    """Build a tiny model of one of transformers' classes with random weights, always the same."""
    model_class = getattr(transformers, name)
    torch.manual_seed(11)
    return fill(model_class(model_class.config_class(**{**GEOMETRY, **fields})))


def saved_once(
    make: Callable[[str], PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Checkpoint]:
    """Return what gives the checkpoint of a model by its name, made at the first call."""

    @cache
    def get(name: str) -> Checkpoint:
        folder, model = tmp_path_factory.mktemp(name), make(name)
        model.save_pretrained(folder)
        return Checkpoint(path=str(folder), model=model)

    return get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These take longest, and come first: of the last files one core has more to do, and the others wait for it."""
    items.sort(key=lambda item: item.path.parent != Path(__file__).parent)


@pytest.fixture(autouse=True)
def everything_is_in_order() -> Iterator[None]:
    """A simulated GPU may have computed what a real one, which goes on while nobody waits for it, would not."""
    with in_order():
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Give the checkpoint of a family, made at the first call."""

    of_family = saved_once(make_model, tmp_path_factory)

    @cache
    def get(family: str) -> Checkpoint:
        if family != BUNDLED.name:
            return of_family(family)
        model = AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()
        return Checkpoint(path=str(BUNDLED), model=model)

    return get


@pytest.fixture(scope="session")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Checkpoint]:
    """Give the checkpoint of a family with two layers, of two kinds if it has them, for kernels that take long."""

    def make(family: str) -> PreTrainedModel:
        kinds = {"layer_types": [*WINDOWS[1:], "full_attention"]} if "layer_types" in FAMILIES[family][2] else {}
        return make_model(family, num_hidden_layers=2, **kinds)

    return saved_once(make, tmp_path_factory)


@pytest.fixture(params=[*FAMILIES, BUNDLED.name])
def family(request: pytest.FixtureRequest, checkpoint: Callable[[str], Checkpoint]) -> Checkpoint:
    """Each family in turn, then the bundled model."""
    return checkpoint(request.param)


def make_engine(checkpoint: Checkpoint, **options: Any) -> Engine:
    """Build an engine of one thread, in float32."""
    return build_engine(EngineConfig(model_path=checkpoint.path, dtype="float32", num_threads=1, **options))


def random_prompts(count: int, longest: int, seed: int = 5) -> list[tuple[int, ...]]:
    """Draw prompts of mixed lengths, 1 and `longest` among them."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, longest, *torch.randint(1, longest + 1, (count,), generator=generator).tolist()][:count]
    return [tuple(torch.randint(0, VOCAB, (length,), generator=generator).tolist()) for length in lengths]


def greedy(name: str, prompt: Sequence[int], num_tokens: int = NUM_TOKENS, **fields: Any) -> Request:
    """Ask for exactly `num_tokens` tokens by greedy decoding."""
    params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
    return Request(request_id=RequestId(name), prompt_ids=tuple(prompt), params=params, **fields)


def emissions_of(engine: Engine, requests: Iterable[Request]) -> dict[str, list[Emission]]:
    """Add all requests at once, step until each has ended, and return what each emitted."""
    found: dict[str, list[Emission]] = {}
    for request in requests:
        found[request.request_id] = []
        engine.add(request)
    alive = set(found)
    give_up_at = time.monotonic() + PATIENCE_S
    while alive:
        assert time.monotonic() < give_up_at, f"still alive: {sorted(alive)}"
        emissions = engine.step()
        for emission in emissions:
            found[emission.request_id].append(emission)
            if emission.finish_reason is not None:
                assert emission.finish_reason is not FinishReason.FAILED, emission.error
                alive.remove(emission.request_id)
        if not emissions:
            time.sleep(0.0005)  # adapters arrive on other threads
    return found


def run_engine(engine: Engine, requests: Iterable[Request]) -> dict[str, list[int]]:
    """Add all requests at once, step until each has ended, and return the tokens of each."""
    return {
        name: [token_id for emission in emissions for token_id in emission.token_ids]
        for name, emissions in emissions_of(engine, requests).items()
    }
