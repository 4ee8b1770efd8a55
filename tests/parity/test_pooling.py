"""Vectors against transformers and peft: the final hidden states, pooled; whatever else is in the batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import PreTrainedModel

from adapters.registry import reference
from engine.build import build_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.errors import EngineError, RequestError
from engine.gpu import build as gpu_build
from engine.request import FinishReason, Pooling, Request, RequestId, SamplingParams
from tests.adapters.handmade import write
from tests.parity.adapter_serving import make_base, prompt_of
from tests.parity.conftest import Checkpoint, emissions_of, greedy, random_prompts
from tests.parity.peft_adapters import load_adapters, save_adapters, save_beyond_products, save_classifier, scores_of
from tests.parity.test_triton_kernels import Replays, config_of

POOLINGS = (Pooling.LAST, Pooling.MEAN)
PROMPTS = random_prompts(3, longest=17)
CHUNKS = {"max_batched_tokens": 7, "max_num_seqs": 7}


def vector_request(name: str, prompt: Sequence[int], pooling: Pooling, **fields: object) -> Request:
    return Request(
        request_id=RequestId(name),
        prompt_ids=tuple(prompt),
        params=SamplingParams(max_tokens=0),
        pooling=pooling,
        **fields,  # type: ignore[arg-type]
    )


@torch.no_grad()
def expected(model: PreTrainedModel, prompt: Sequence[int], pooling: Pooling) -> np.ndarray:
    """What transformers gives: the last of its hidden states stands behind the final norm."""
    states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0]
    return np.asarray(states.mean(0) if pooling is Pooling.MEAN else states[-1])


def vectors_of(engine: Engine, requests: Iterable[Request]) -> dict[str, np.ndarray]:
    """Run requests together; return the vectors of those that ask for one."""
    found = emissions_of(engine, requests)
    ends = {name: emissions[-1] for name, emissions in found.items()}
    return {name: np.frombuffer(end.pooled, "<f4") for name, end in ends.items() if end.pooled is not None}


def assert_same(found: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=1e-4)


def make_engine(path: str, adapters: Sequence[object] = (), **options: int) -> Engine:
    config = EngineConfig(model_path=path, dtype="float32", num_threads=1, max_adapter_rank=16, **options)
    return build_engine(config, adapters)  # type: ignore[arg-type]


def check_mixed_batch(family: Checkpoint, engine: Engine) -> None:
    """Vectors of both kinds beside generations; then again, where the prefix cache holds what it may."""
    prompts = random_prompts(6, longest=70)
    wanted = {(i, pooling): expected(family.model, p, pooling) for i, p in enumerate(prompts) for pooling in POOLINGS}
    for _ in range(2):
        asked = [vector_request(f"{i} {kind}", p, kind) for i, p in enumerate(prompts) for kind in POOLINGS]
        asked[3:3] = [greedy(str(i), prompt) for i, prompt in enumerate(prompts[:3])]
        found = vectors_of(engine, asked)
        assert len(found) == len(wanted)
        for (i, kind), vector in wanted.items():
            assert_same(found[f"{i} {kind}"], vector)
    assert engine.snapshot().kv_usage == 0


def test_vectors_beside_generations_are_those_of_transformers(family: Checkpoint) -> None:
    """Of more tokens than a step has, so that some prompts are read whole, together, and others in chunks."""
    check_mixed_batch(family, make_engine(family.path, max_batched_tokens=50, max_num_seqs=15))


@pytest.mark.parametrize("name", ["mistral", "qwen3"])
def test_a_decoder_that_was_saved_by_itself_makes_the_vectors_of_transformers(
    name: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    whole = checkpoint(name)
    whole.model.model.save_pretrained(tmp_path)
    engine = make_engine(str(tmp_path))
    prompt = PROMPTS[1]
    for kind in POOLINGS:
        (vector,) = vectors_of(engine, [vector_request("v", prompt, kind)]).values()
        assert_same(vector, expected(whole.model, prompt, kind))
    with pytest.raises(RequestError, match="cannot generate text") as refused:
        engine.add(greedy("a", prompt))
    assert refused.value.field == "model"


def test_torch_operators_give_the_same(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.native.load", lambda: None)
    family = checkpoint("qwen3")
    check_mixed_batch(family, make_engine(family.path, **CHUNKS))


def test_generations_do_not_see_vectors(checkpoint: Callable[[str], Checkpoint]) -> None:
    family = checkpoint("llama3")
    prompts = random_prompts(4, longest=60)
    asked = [vector_request(f"v{i}", prompt, Pooling.MEAN) for i, prompt in enumerate(prompts)]
    found = emissions_of(
        make_engine(family.path, **CHUNKS), [*asked, *(greedy(str(i), prompt) for i, prompt in enumerate(prompts))]
    )
    for i, prompt in enumerate(prompts):
        assert [token for emission in found[str(i)] for token in emission.token_ids] == family.generate(prompt)


def test_the_prefix_cache_serves_last_tokens_and_never_means(checkpoint: Callable[[str], Checkpoint]) -> None:
    family = checkpoint("llama2")
    engine = make_engine(family.path)
    prompt = random_prompts(2, longest=70)[1]
    emissions_of(engine, [greedy("warm", prompt)])
    for kind, is_cached in ((Pooling.LAST, True), (Pooling.MEAN, False)):
        (end,) = emissions_of(engine, [vector_request("v", prompt, kind)])["v"]
        assert (end.num_cached_tokens > 0) == is_cached
        assert_same(np.frombuffer(end.pooled or b"", "<f4"), expected(family.model, prompt, kind))


def test_a_prompt_may_fill_the_whole_context(checkpoint: Callable[[str], Checkpoint]) -> None:
    family = checkpoint("qwen2")
    prompt = random_prompts(2, longest=64)[1]
    found = vectors_of(make_engine(family.path, max_model_len=64), [vector_request("v", prompt, Pooling.LAST)])
    assert_same(found["v"], expected(family.model, prompt, Pooling.LAST))


def test_vectors_of_adapters_are_those_of_peft(checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    family = checkpoint("llama-with-biases")
    path_by_name = save_adapters(family.model, tmp_path)
    names = ("everything", "patterns")
    adapters = [reference(name, path_by_name[name]) for name in names]
    asked = [
        vector_request(f"{i} {adapter.name} {kind}", prompt, kind, adapter=adapter.digest)
        for i, prompt in enumerate(PROMPTS)
        for adapter in adapters
        for kind in POOLINGS
    ]
    found = vectors_of(make_engine(family.path, adapters, **CHUNKS), [*asked, greedy("g", PROMPTS[1], 2)])
    theirs = load_adapters(family.model, {name: path_by_name[name] for name in names})
    try:
        for i, prompt in enumerate(PROMPTS):
            for name in names:
                theirs.set_adapter(name)
                for kind in POOLINGS:
                    assert_same(found[f"{i} {name} {kind}"], expected(theirs, prompt, kind))
    finally:
        theirs.unload()


def test_vectors_of_adapters_that_change_the_whole_model_are_those_of_peft(tmp_path: Path) -> None:
    base = make_base("llama")
    base.save_pretrained(tmp_path / "base")
    path_by_name = save_beyond_products(lambda: make_base("llama"), tmp_path)
    names = ("norms", "both-ends", "dora-and-biases")
    adapters = [reference(name, path_by_name[name]) for name in names]
    prompts = [prompt_of(length) for length in (2, 19)]
    asked = [
        vector_request(f"{i} {adapter.name} {kind}", prompt, kind, adapter=adapter.digest)
        for i, prompt in enumerate(prompts)
        for adapter in adapters
        for kind in POOLINGS
    ]
    found = vectors_of(make_engine(str(tmp_path / "base"), adapters, **CHUNKS), [*asked, greedy("g", prompts[1], 2)])
    for name in names:
        theirs = PeftModel.from_pretrained(make_base("llama"), path_by_name[name]).eval()
        for i, prompt in enumerate(prompts):
            for kind in POOLINGS:
                wanted = expected(theirs, prompt, kind)
                assert not np.allclose(wanted, expected(base, prompt, kind), atol=0.01)
                assert_same(found[f"{i} {name} {kind}"], wanted)


def check_classifiers(family: Checkpoint, folder: Path, make: Callable[[Sequence[object]], Engine]) -> None:
    """Scores beside vectors, generations and other adapters; then again, of cached prompts."""
    plain = reference("everything", save_adapters(family.model, folder)["everything"])
    saved = [
        save_classifier(family.path, folder / "three", 3),
        save_classifier(family.path, folder / "one", 1, modules_to_save=["norm"], use_rslora=True),
    ]
    assert [ref.num_labels for ref, _ in saved] == [3, 1]
    prompts = random_prompts(3, longest=40)
    engine = make([plain, *(ref for ref, _ in saved)])
    generated = None
    for _ in range(2):
        asked = [greedy("base", prompts[0], 3), greedy("plain", prompts[1], 3, adapter=plain.digest)]
        asked += [
            vector_request(f"{i} {ref.name} {kind}", prompt, kind, adapter=ref.digest)
            for i, prompt in enumerate(prompts)
            for ref, _ in saved
            for kind in (Pooling.CLASS, Pooling.LAST)
        ]
        found = emissions_of(engine, asked)
        tokens = [[token for part in found[name] for token in part.token_ids] for name in ("base", "plain")]
        assert generated in (None, tokens)
        generated = tokens
        assert tokens[0] == family.generate(prompts[0])[:3]
        for i, prompt in enumerate(prompts):
            for ref, theirs in saved:
                scores = np.frombuffer(found[f"{i} {ref.name} class"][-1].pooled or b"", "<f4")
                assert scores.shape == (ref.num_labels,)
                assert_same(scores, scores_of(theirs, prompt))
                vector = np.frombuffer(found[f"{i} {ref.name} last"][-1].pooled or b"", "<f4")
                assert_same(vector, expected(theirs, prompt, Pooling.LAST))


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma2"])
def test_scores_of_classifiers_are_those_of_peft(
    name: str, checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    family = checkpoint(name)
    check_classifiers(family, tmp_path, lambda adapters: make_engine(family.path, adapters, **CHUNKS))


def test_torch_operators_score_the_same(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.native.load", lambda: None)
    family = checkpoint("qwen2")
    check_classifiers(family, tmp_path, lambda adapters: make_engine(family.path, adapters, **CHUNKS))


def test_a_step_needs_no_adapter_by_name_once_it_has_begun(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is cancelled while a step is paused leaves an adapter that may be evicted before the step goes on."""
    family = checkpoint("llama2")
    ref, theirs = save_classifier(family.path, tmp_path / "two", 2)
    engine = make_engine(family.path, [ref])
    runner = engine._runner
    proceed = runner.proceed

    def gone(digest: str) -> None:
        raise EngineError(f"adapter {digest} is gone")

    def proceed_without() -> bool:
        with monkeypatch.context() as patched:
            patched.setattr(runner, "_weights_of", gone)
            return proceed()

    monkeypatch.setattr(runner, "proceed", proceed_without)
    found = vectors_of(engine, [vector_request("v", PROMPTS[1], Pooling.CLASS, adapter=ref.digest)])
    assert_same(found["v"], scores_of(theirs, PROMPTS[1]))


def test_a_classifier_generates_what_its_products_alone_do(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    """And those, which have no scores, end no other request if they are asked for some."""
    family = checkpoint("llama2")
    ref, _ = save_classifier(family.path, tmp_path / "whole", 2)
    tensors = load_file(f"{ref.path}/adapter_model.safetensors")
    del tensors["base_model.model.score.weight"]
    config = json.loads(Path(ref.path, "adapter_config.json").read_text()) | {"modules_to_save": None}
    products = reference("products", write(tmp_path / "products", config, tensors))
    assert products.num_labels == 0
    engine = make_engine(family.path, [ref, products])
    prompt = PROMPTS[1]
    asked = [greedy(each.name, prompt, adapter=each.digest) for each in (ref, products)]
    found = emissions_of(engine, asked)
    told = [[token for part in found[name] for token in part.token_ids] for name in ("whole", "products")]
    assert told[0] == told[1] != family.generate(prompt)
    for each in (ref, products):
        engine.add(vector_request(each.name, prompt, Pooling.CLASS, adapter=each.digest))
    ends = {emission.request_id: emission for _ in range(4) for emission in engine.step()}
    assert ends[RequestId("products")].finish_reason is FinishReason.FAILED
    assert len(ends[RequestId("whole")].pooled or b"") == 8


def test_the_gpus_kernels_give_the_same(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One vector whose tokens do not fit into a step, with an adapter, and beside it one of norms and one of scores."""
    family = checkpoint("llama3")
    adapter = reference("everything", save_adapters(family.model, tmp_path)["everything"])
    norms = reference("norms", save_beyond_products(lambda: deepcopy(family.model), tmp_path)["norms"])
    scores, _ = save_classifier(family.path, tmp_path / "scores", 2)
    prompt = PROMPTS[1][:9]
    asked = [
        vector_request("mean", prompt, Pooling.MEAN, adapter=adapter.digest),
        vector_request("last", prompt[:3], Pooling.LAST, adapter=norms.digest),
        vector_request("class", prompt[:4], Pooling.CLASS, adapter=scores.digest),
    ]
    adapters = [adapter, norms, scores]
    on_the_cpu = vectors_of(make_engine(family.path, adapters), asked)
    Replays(monkeypatch)
    # No step that has a vector is replayed.
    monkeypatch.setattr(gpu_build, "recorded_sizes", lambda _: [])
    found = vectors_of(build_engine(replace(config_of(family.path), max_batched_tokens=8), adapters), asked)
    assert found.keys() == on_the_cpu.keys() == {"mean", "last", "class"}
    for name, vector in found.items():
        assert_same(vector, on_the_cpu[name])
