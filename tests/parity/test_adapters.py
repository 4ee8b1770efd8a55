"""Adapters against peft: first the matrices, in a forward pass of transformers; then the engine, token by token."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from adapters.identity import AdapterDigest
from adapters.loading import load_adapter
from adapters.registry import reference
from adapters.validate import LinearShapes
from adapters.weights import AdapterWeights
from engine.build import build_engine
from engine.config import EngineConfig
from engine.lora import AdapterSegment, LoraBatch, ResidentAdapters, Segment, collect_segments
from engine.request import Emission, FinishReason, Request, RequestId, SamplingParams
from tests.parity.peft_adapters import CONFIGS, load_adapters, save_adapters

VOCAB = 128
GEOMETRY = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
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
    model = Qwen2ForCausalLM(Qwen2Config(**GEOMETRY)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.2)
    return model


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
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp(f"{family}-base"))
    make_base(family).save_pretrained(folder)
    return folder


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
    batch = LoraBatch(collect_segments(segments, loaded))

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


NUM_TOKENS = 20
PROMPT_LENGTHS = (3, 21, 40)
BASE = "base"


def prompt_of(length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist())


@pytest.fixture(scope="module")
def expected(with_peft: peft.PeftModel) -> dict[tuple[str, int], tuple[int, ...]]:
    """What peft generates greedily for every adapter (and the base) and every prompt, one at a time."""
    answers = {}
    for length in PROMPT_LENGTHS:
        ids = torch.tensor([prompt_of(length)])
        for name in (BASE, *CONFIGS):
            if name != BASE:
                with_peft.set_adapter(name)
            with with_peft.disable_adapter() if name == BASE else nullcontext():
                out = with_peft.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=NUM_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                )
            answers[(name, length)] = tuple(out[0, length:].tolist())
    assert len(set(answers.values())) == len(answers), "adapters without effect prove nothing"
    return answers


class Serving:
    """An engine over the checkpoint, with all adapters declared."""

    def __init__(self, checkpoint: str, path_by_name: dict[str, str], **options: int) -> None:
        refs = [reference(name, path) for name, path in path_by_name.items()]
        self.digest_by_name = {ref.name: ref.digest for ref in refs}
        settings = {"max_num_seqs": 32, "kv_cache_bytes": 4 << 20, "num_threads": 1, **options}
        config = EngineConfig(model_path=checkpoint, device="cpu", dtype="float32", **settings)  # type: ignore[arg-type]
        self.engine = build_engine(config, refs)
        self._num_requests = 0

    def add(self, name: str, length: int, **changes: object) -> RequestId:
        self._num_requests += 1
        request = Request(
            request_id=RequestId(f"{self._num_requests}"),
            prompt_ids=prompt_of(length),
            params=SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True),
            adapter=self.digest_by_name.get(name),
        )
        self.engine.add(replace(request, **changes))  # type: ignore[arg-type]
        return request.request_id

    def finish(self, ids: list[RequestId]) -> dict[RequestId, list[Emission]]:
        """Step until all the requests have ended; loads are awaited in between, as they come from other threads."""
        emissions: dict[RequestId, list[Emission]] = {request_id: [] for request_id in ids}
        open_ids = set(ids)
        deadline_s = time.monotonic() + 60
        while open_ids:
            assert time.monotonic() < deadline_s
            stepped = self.engine.step()
            for emission in stepped:
                emissions[emission.request_id].append(emission)
                if emission.finish_reason is not None:
                    open_ids.discard(emission.request_id)
            if not stepped:
                time.sleep(0.001)
        return emissions

    def answers(self, asked: list[tuple[str, int]]) -> list[tuple[int, ...]]:
        ids = [self.add(name, length) for name, length in asked]
        done = self.finish(ids)
        assert all(done[i][-1].finish_reason == FinishReason.LENGTH for i in ids)
        return [tuple(token for emission in done[i] for token in emission.token_ids) for i in ids]


@pytest.fixture
def serve(checkpoint: str, path_by_name: dict[str, str]) -> Iterator[Callable[..., Serving]]:
    started: list[Serving] = []

    def start(**options: int) -> Serving:
        started.append(Serving(checkpoint, path_by_name, **options))
        return started[-1]

    yield start
    for serving in started:
        serving.engine.stop()
        serving.engine.run(lambda _: None)


Expected = dict[tuple[str, int], tuple[int, ...]]


def test_each_adapter_alone_generates_what_peft_generates(serve: Callable[..., Serving], expected: Expected) -> None:
    serving = serve()
    for asked, tokens in expected.items():
        assert serving.answers([asked]) == [tokens], asked


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[set[AdapterDigest | None]]:
    """What every step had in its batch: digests, and None for the base."""
    seen: list[set[AdapterDigest | None]] = []

    def record(segments: list[Segment], pool: ResidentAdapters) -> tuple[AdapterSegment, ...]:
        seen.append({digest for digest, _, _ in segments})
        return collect_segments(segments, pool)

    monkeypatch.setattr("engine.runner.collect_segments", record)
    return seen


@pytest.mark.parametrize(
    "options",
    [{}, {"max_batched_tokens": 7, "max_num_seqs": 7}, {"block_tokens": 4, "kv_cache_bytes": 200_000}],
    ids=["at once", "in chunks of 7", "in a small cache"],
)
def test_eight_adapters_and_base_requests_mix_in_one_batch(
    serve: Callable[..., Serving],
    expected: Expected,
    options: dict[str, int],
    batches: list[set[AdapterDigest | None]],
) -> None:
    asked = random.Random(5).sample(sorted(expected), len(expected))
    serving = serve(**options)
    # Once all are resident, what shares a batch no longer hangs on how fast each was loaded.
    serving.answers([(name, 3) for name in CONFIGS])
    batches.clear()
    assert serving.answers(asked) == [expected[pair] for pair in asked]
    if not options:
        assert max(len(batch) for batch in batches) == 9
    if "kv_cache_bytes" in options:
        assert serving.engine.snapshot().num_preemptions > 0


@pytest.mark.parametrize("slots", [1, 3])
def test_more_adapters_than_slots_all_get_their_turn(
    serve: Callable[..., Serving], expected: Expected, slots: int
) -> None:
    serving = serve(max_device_adapters=slots, max_host_adapters=slots + 1)
    assert serving.answers(list(expected)) == list(expected.values())
    assert serving.engine.snapshot().num_resident_adapters <= slots


def test_adapters_do_not_share_cached_prefixes_and_one_adapter_does_with_itself(
    serve: Callable[..., Serving], expected: Expected
) -> None:
    serving = serve()
    names = [BASE, "attention", "everything"]
    for name in names:
        (request_id,) = ids = [serving.add(name, 40)]
        first = serving.finish(ids)[request_id][0]
        assert first.num_cached_tokens == 0, "another adapter's keys and values were taken"
    for name in names:
        (request_id,) = ids = [serving.add(name, 40)]
        emissions = serving.finish(ids)[request_id]
        assert emissions[0].num_cached_tokens == 32
        assert tuple(t for e in emissions for t in e.token_ids) == expected[(name, 40)]


def test_an_adapter_that_cannot_be_loaded_fails_its_own_requests_only(
    checkpoint: str, path_by_name: dict[str, str], expected: Expected, tmp_path: Path
) -> None:
    broken = shutil.copytree(path_by_name["attention"], tmp_path / "broken")
    config = json.loads((broken / "adapter_config.json").read_text())
    (broken / "adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    serving = Serving(checkpoint, {**path_by_name, "broken": str(broken)})
    bad, good = serving.add("broken", 21), serving.add("gates", 21)
    done = serving.finish([bad, good])
    assert done[bad][-1].finish_reason == FinishReason.FAILED
    assert "'broken'" in (done[bad][-1].error or "")
    assert tuple(t for e in done[good] for t in e.token_ids) == expected[("gates", 21)]
    serving.engine.stop()
    serving.engine.run(lambda _: None)
