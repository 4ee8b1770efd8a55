"""Adapters against peft: first the matrices, in a forward pass of transformers; then the engine, token by token."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path

import peft
import pytest
import torch
from transformers import PreTrainedModel

from adapters.identity import AdapterDigest
from adapters.loading import AdapterLoader
from adapters.registry import reference
from adapters.validate import ModuleShapes
from adapters.weights import AdapterWeights
from engine.lora import AdapterSegment, LoraBatch, Segment, WeightsOf, collect_segments
from engine.request import FinishReason
from tests.adapters.handmade import opens
from tests.parity.adapter_serving import NUM_TOKENS, VOCAB, Serving, make_base, prompt_of, starting
from tests.parity.peft_adapters import CONFIGS, generated, load_adapters, save_adapters


def shapes_of(model: PreTrainedModel) -> ModuleShapes:
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


def no_base(name: str) -> torch.Tensor:
    raise AssertionError(f"plain LoRA does not depend on the base's {name}")


class Loaded:
    """All adapters, loaded by us."""

    def __init__(self, path_by_name: dict[str, str], shapes: ModuleShapes) -> None:
        refs = {name: reference(name, path) for name, path in path_by_name.items()}
        loader = AdapterLoader(shapes, 64, torch.float32, opens(no_base))
        self.digest_by_name = {name: ref.digest for name, ref in refs.items()}
        self._weights = {ref.digest: loader.load(ref) for ref in refs.values()}

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
    batch = LoraBatch(collect_segments(segments, loaded.weights))

    def hook(layer: int, module: str) -> object:
        def add(_: object, inputs: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
            x, y = inputs[0].reshape(-1, inputs[0].shape[-1]), output.reshape(-1, output.shape[-1]).clone()
            return batch.multiply(lambda _: y, x, layer, (module,), (y.shape[1],)).view_as(output)

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


PROMPT_LENGTHS = (3, 21, 40)
BASE = "base"


@pytest.fixture(scope="module")
def expected(with_peft: peft.PeftModel) -> dict[tuple[str, int], tuple[int, ...]]:
    """What peft generates greedily for every adapter (and the base) and every prompt, one at a time."""
    answers = {}
    for length in PROMPT_LENGTHS:
        for name in (BASE, *CONFIGS):
            if name != BASE:
                with_peft.set_adapter(name)
            with with_peft.disable_adapter() if name == BASE else nullcontext():
                answers[(name, length)] = generated(with_peft, prompt_of(length), NUM_TOKENS)
    assert len(set(answers.values())) == len(answers), "adapters without effect prove nothing"
    return answers


@pytest.fixture
def serve(checkpoint: str, path_by_name: dict[str, str]) -> Iterator[Callable[..., Serving]]:
    with starting(checkpoint, path_by_name) as start:
        yield start


Expected = dict[tuple[str, int], tuple[int, ...]]


def test_each_adapter_alone_generates_what_peft_generates(serve: Callable[..., Serving], expected: Expected) -> None:
    serving = serve()
    for asked, tokens in expected.items():
        assert serving.answers([asked]) == [tokens], asked


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[set[AdapterDigest | None]]:
    """What every step had in its batch: digests, and None for the base."""
    seen: list[set[AdapterDigest | None]] = []

    def record(segments: Iterable[Segment], weights_of: WeightsOf) -> tuple[AdapterSegment, ...]:
        known = list(segments)
        seen.append({digest for digest, _, _ in known})
        return collect_segments(known, weights_of)

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
        assert serving.engine.snapshot().counters.num_preemptions > 0


@pytest.mark.parametrize("slots", [1, 3])
def test_more_adapters_than_slots_all_get_their_turn(
    serve: Callable[..., Serving], expected: Expected, slots: int
) -> None:
    serving = serve(max_device_adapters=slots, max_host_adapter_bytes=80_000)
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
