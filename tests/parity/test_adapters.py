"""Adapters against peft: the matrices we load, applied to a batch, are what peft computes."""

from __future__ import annotations

from collections.abc import Iterator

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from adapters.identity import AdapterDigest
from adapters.loading import load_adapter
from adapters.registry import reference
from adapters.validate import LinearShapes
from adapters.weights import AdapterWeights
from engine.lora import LoraBatch
from tests.parity.peft_adapters import CONFIGS, load_adapters, save_adapters

VOCAB = 128
GEOMETRY = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def make_base(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**GEOMETRY)).eval()
    return Qwen2ForCausalLM(Qwen2Config(**GEOMETRY)).eval()


def shapes_of(model: PreTrainedModel) -> LinearShapes:
    return {
        name: (module.in_features, module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path_by_name(family: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_adapters(make_base(family), tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def with_peft(family: str, path_by_name: dict[str, str]) -> peft.PeftModel:
    return load_adapters(make_base(family), path_by_name)


class Loaded:
    """All adapters, loaded by us."""

    def __init__(self, path_by_name: dict[str, str], shapes: LinearShapes) -> None:
        refs = {name: reference(name, path) for name, path in path_by_name.items()}
        self.digest_by_name = {name: ref.digest for name, ref in refs.items()}
        self._weights = {ref.digest: load_adapter(ref, shapes, 64, torch.float32) for ref in refs.values()}

    def weights(self, digest: AdapterDigest) -> AdapterWeights:
        return self._weights[digest]


@pytest.fixture
def batched(family: str, path_by_name: dict[str, str]) -> Iterator[torch.Tensor]:
    """Logits of one prompt for the base and every adapter, in one batch of transformers with our LoRA hooked in."""
    model = make_base(family)
    loaded = Loaded(path_by_name, shapes_of(model))
    ids = prompt().repeat(len(CONFIGS) + 1, 1)
    width = ids.shape[1]
    names = [None, *CONFIGS]
    segments = [
        (loaded.digest_by_name[name] if name else None, i * width, (i + 1) * width) for i, name in enumerate(names)
    ]
    batch = LoraBatch.build(segments, loaded)
    assert batch is not None

    def hook(layer: int, module: str) -> object:
        def add(_: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            x, y = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1]).clone()
            batch.apply(layer, module, x, y)
            return y.view_as(output)

        return add

    for index, layer in enumerate(model.model.layers):
        for name, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_hook(hook(index, name.rpartition(".")[2]))
    with torch.inference_mode():
        yield model(ids).logits


def prompt() -> torch.Tensor:
    return torch.randint(0, VOCAB, (1, 12), generator=torch.Generator().manual_seed(3))


def test_every_adapter_in_one_batch_computes_the_logits_of_peft(
    batched: torch.Tensor, with_peft: peft.PeftModel
) -> None:
    with torch.inference_mode():
        for index, name in enumerate(CONFIGS, start=1):
            with_peft.set_adapter(name)
            torch.testing.assert_close(batched[index : index + 1], with_peft(prompt()).logits, atol=2e-4, rtol=1e-4)
        with with_peft.disable_adapter():
            base = with_peft(prompt()).logits
    torch.testing.assert_close(batched[:1], base, atol=2e-4, rtol=1e-4)
    changed = (batched[1:] - base).abs().amax(dim=(1, 2))
    assert (changed > 0.1).all(), "an adapter without effect proves nothing"
