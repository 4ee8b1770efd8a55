"""By the GPU's kernels, in Triton's interpreter where there is no GPU: the tokens are those of transformers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from adapters.identity import AdapterRef
from adapters.registry import reference
from engine import resolve
from engine.adapter_pool import AdapterPool
from engine.build import build_engine
from engine.config import EngineConfig
from engine.gpu import backend, streamed_linear
from engine.gpu import build as gpu_build
from engine.gpu.runtime import CudaRuntime
from engine.gpu.streamed_linear import StreamedLinear, Way
from engine.request import DryPenalty, LzPenalty, Request, RequestId, SamplingParams
from kernels.rope_attention import launch as rope_launch
from kernels.streamed_linear.reference import from_int4, to_fp8, to_int4
from kernels.streamed_linear.reference import streamed_linear as by_definition
from tests.deployments.tiny_models import write_chat_model
from tests.engine import fp8_checkpoints, int4_checkpoints
from tests.parity.conftest import Checkpoint, emissions_of, greedy, make_model, random_prompts, run_engine
from tests.parity.gpu_parts import HAS_GPU, Replays, an_fp8_gpu, config_of, join_few_rows
from tests.parity.peft_adapters import save_adapters, saved_adapters

NUM_TOKENS = 4


FAMILIES = ("llama3", "qwen3", "gemma2", "gemma3", "granite", "olmo3", "phi3-partial", "qwen2-moe", "gpt-oss")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_mixed_batch_gets_the_tokens_of_transformers(
    shallow: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    family = shallow(name)
    # What no step of these replays is the same for all families.
    replays = Replays(monkeypatch, computes_all=name in ("qwen3", "gpt-oss"))
    prompts = random_prompts(5, longest=30)
    requests = [greedy(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    found = run_engine(build_engine(config_of(family.path)), requests)
    assert found == {str(i): family.generate(prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)}
    assert replays.are_there
    assert replays.waits == []


JOINED = {"rope_attention", "row_linear normed", "row_linear added", "row_linear"}


@pytest.mark.parametrize(
    ("name", "joins"),
    [("llama-with-biases", JOINED), ("qwen3", JOINED), ("gemma2", {"row_linear normed", "row_linear"})],
)
def test_a_row_or_two_get_the_tokens_of_transformers_by_kernels_that_do_more_at_once(
    shallow: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, name: str, joins: set[str]
) -> None:
    """Products that norm and add, and attention that rotates and writes, where the family's are such."""
    monkeypatch.setattr(rope_launch, "MAX_NUMBER_BYTES", 4)
    join_few_rows(monkeypatch, others=Way.LIBRARY)
    launched = Counter[str]()
    for module, kernel in ((backend, "rope_attention"), (streamed_linear, "row_linear")):
        monkeypatch.setattr(module, kernel, _noting(kernel, getattr(module, kernel), launched))
    family = shallow(name)
    replays = Replays(monkeypatch)
    prompts = random_prompts(3, longest=24)
    requests = [greedy(str(i), prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
    found = run_engine(build_engine(replace(config_of(family.path), max_num_seqs=2)), requests)
    assert found == {str(i): family.generate(prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)}
    assert replays.are_there
    assert replays.waits == []
    assert launched.keys() == joins


def _noting(name: str, launch: Callable[..., torch.Tensor], counts: Counter[str]) -> Callable[..., torch.Tensor]:
    def counted(*args: Any, **named: Any) -> torch.Tensor:
        does = " normed" if named.get("norm") else " added" if named.get("is_added") else ""
        counts[name + does] += 1
        return launch(*args, **named)

    return counted


@pytest.mark.parametrize("name", ["llama3", "gemma3"])
def test_adapters_and_draws_are_those_of_the_cpu(
    shallow: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Adapters of different ranks and modules, DoRA and biases, from mid-prompt on too, greedy and drawn."""
    family = shallow(name)
    adapters = saved_adapters(family.model, tmp_path, "everything", "patterns", "dora", "lora-bias")
    first, second, dora, biased = (adapter.digest for adapter in adapters)
    prompts = random_prompts(6, longest=20)
    digests = [first, second, None, dora, None, biased]
    drawn = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.8, seed=11, ignore_eos=True)
    sorted_too = replace(
        drawn, top_k=20, top_p=0.9, repetition_penalty=1.2, dry=DryPenalty(multiplier=2.0, allowed_length=1),
        lz=LzPenalty(strength=0.5),
    )  # fmt: skip

    def requests() -> list[Request]:
        plain = [
            greedy(str(i), p, NUM_TOKENS, adapter=d, adapter_start=len(p) // 2 * (i % 2))
            for i, (p, d) in enumerate(zip(prompts, digests, strict=True))
        ]
        return [*plain[:3], replace(plain[3], params=drawn), replace(plain[4], params=sorted_too), plain[5]]

    expected = run_engine(build_engine(config_of(family.path, "cpu"), adapters), requests())
    replays = Replays(monkeypatch)
    assert run_engine(build_engine(config_of(family.path), adapters), requests()) == expected
    assert replays.are_there
    assert replays.waits == []


def test_adapters_that_lie_in_lent_blocks_of_the_cache_give_the_tokens_of_the_cpu(
    shallow: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crowd of adapters where one has room; then prompts that want the blocks back, and the crowd again."""
    family = shallow("llama3")
    path_by_name = save_adapters(family.model, tmp_path)
    adapters = [reference(name, path) for name, path in path_by_name.items()]
    crowd = [
        # One token behind the prompt, one by a recorded step: where an adapter lies is the same for all that follow.
        greedy(f"{turn}-{i}", prompt, 2, adapter=ref.digest)
        for turn in range(2)
        for i, (prompt, ref) in enumerate(zip(random_prompts(len(adapters), longest=6), adapters, strict=True))
    ]
    long = [greedy(f"long-{i}", tuple(range(3 + i, 63 + i)), 2) for i in range(4)]
    turns = [[*crowd[: len(adapters)]], long, [*crowd[len(adapters) :]]]
    few = replace(config_of(family.path), max_model_len=64, kv_cache_bytes=4 * 64 * family.token_bytes)
    config = replace(few, max_batched_tokens=256)
    cpu = build_engine(replace(config, device="cpu"), adapters)
    expected = [run_engine(cpu, requests) for requests in turns]
    monkeypatch.setattr(resolve, "LENT_PAGE_BYTES", 8192)
    loans = Counter[str]()
    for name in ("lend", "give_back"):
        monkeypatch.setattr(AdapterPool, name, _counted(getattr(AdapterPool, name), loans))
    with an_fp8_gpu(monkeypatch):
        engine = build_engine(replace(config, max_device_adapter_bytes=80_000, max_lent_cache_share=0.5), adapters)
    assert [run_engine(engine, requests) for requests in turns] == expected
    assert loans["lend"] > 1
    assert loans["give_back"] > 0


def test_adapters_of_the_whole_model_give_the_tokens_of_the_cpu_beside_plain_ones_and_the_base(
    shallow: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings, output matrices and norms, by products and of their own; then the batch without such an adapter."""
    family = shallow("llama3")
    names = ("everything", "both-ends", "own-ends", "norms", "dora-and-biases", "embedding-dora", "tokens-of-each-end")
    adapters = saved_adapters(family.model, tmp_path, *names)
    digests = [None, *(adapter.digest for adapter in adapters)]
    prompts = random_prompts(len(digests), longest=12)
    requests = [greedy(str(i), p, NUM_TOKENS, adapter=d) for i, (p, d) in enumerate(zip(prompts, digests, strict=True))]
    expected = run_engine(build_engine(config_of(family.path, "cpu"), adapters), requests)
    replays = Replays(monkeypatch)
    engine = build_engine(config_of(family.path), adapters)
    assert run_engine(engine, requests) == expected
    assert replays.are_there
    assert replays.waits == []
    assert run_engine(engine, requests[:2]) == {name: expected[name] for name in ("0", "1")}


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "olmo3"])
def test_norms_of_adapters_give_the_tokens_of_the_cpu(
    checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Of heads, of all heads together, of what a part adds; weights that are told from 1 on, and float32 ones."""
    family = checkpoint(name)
    (adapter,) = saved_adapters(family.model, tmp_path, "norms")
    prompts = random_prompts(3, longest=12)
    digests = [adapter.digest, None, adapter.digest]
    requests = [greedy(str(i), p, NUM_TOKENS, adapter=d) for i, (p, d) in enumerate(zip(prompts, digests, strict=True))]
    expected = run_engine(build_engine(config_of(family.path, "cpu"), [adapter]), requests)
    assert expected["0"] != family.generate(prompts[0], NUM_TOKENS), "an adapter without effect proves nothing"
    replays = Replays(monkeypatch)
    assert run_engine(build_engine(replace(config_of(family.path), max_num_seqs=4), [adapter]), requests) == expected
    assert replays.are_there
    assert replays.waits == []


@pytest.mark.parametrize("name", ["both-ends", "own-ends", "norms"])
def test_adapters_of_the_whole_model_give_nearly_the_same_probabilities_in_half_precision(
    shallow: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    family = shallow("llama3")
    (adapter,) = saved_adapters(family.model, tmp_path, name)
    expected = _logprobs(config_of(family.path, "cpu"), adapter)
    with an_fp8_gpu(monkeypatch):
        found = _logprobs(replace(config_of(family.path), dtype="float16"), adapter)
    variation = float((found.exp() - expected.exp()).abs().sum()) / 2
    assert variation < 0.01


@pytest.mark.parametrize(("held", "tolerance"), [("int8", 0.03), ("fp8", 0.1)])
def test_a_cache_of_one_byte_a_number_gives_nearly_the_same_probabilities(
    checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch, held: str, tolerance: float
) -> None:
    """Of a prompt in several chunks, the later ones of which read what the earlier ones have written.

    The tolerance is of the total variation; a random model's attention is far more easily led than a trained one's.
    """
    path = checkpoint("llama3").path
    expected = _logprobs(config_of(path, "cpu"))
    with an_fp8_gpu(monkeypatch):
        found = _logprobs(replace(config_of(path), kv_cache_dtype=held))
    variation = float((found.exp() - expected.exp()).abs().sum()) / 2
    assert 0 < variation < tolerance


@pytest.mark.parametrize("name", ["llama2", "gemma2"])
def test_weights_of_four_bits_give_the_probabilities_of_the_numbers_they_stand_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """With an adapter upon them: by the kernel for few rows, the end of the prompt, and the other way before."""
    model = make_model(name, hidden_size=128, intermediate_size=128)
    (adapter,) = saved_adapters(model, tmp_path, "everything")
    projections = [weight for name, weight in model.named_parameters() if "proj" in name]
    for weight in projections:
        weight.data = weight.data.half().float() / 4
    model.save_pretrained(tmp_path / "base")
    for weight in projections:
        weight.data = from_int4(to_int4(weight.data.half())).float()
    model.save_pretrained(tmp_path / "rounded")
    expected = _logprobs(config_of(str(tmp_path / "rounded"), "cpu"), adapter)
    monkeypatch.setattr(gpu_build, "measure", _stream_few_rows)
    with an_fp8_gpu(monkeypatch):
        config = config_of(str(tmp_path / "base"))
        found = _logprobs(replace(config, dtype="float16", quantization="int4"), adapter)
    assert float((found.exp() - expected.exp()).abs().sum()) / 2 < 0.01


@pytest.mark.parametrize(("kind", "group"), [("awq", 128), ("gptq", 32), ("packed", 64)])
def test_a_checkpoint_of_four_bits_gives_the_probabilities_of_the_numbers_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, group: int
) -> None:
    """On a CPU nearly exactly, for it rounds nothing; on a GPU as the weights that are rounded here are."""
    model = make_model("llama2", hidden_size=128, intermediate_size=128)
    model.save_pretrained(tmp_path / "meant")
    tensors = {name: tensor / 4 if "proj" in name else tensor for name, tensor in model.state_dict().items()}
    stored, meant = int4_checkpoints.quantize_layers(tensors, kind, group)
    _save(tmp_path, stored, meant, int4_checkpoints.config_of(kind, group))
    expected = _logprobs(config_of(str(tmp_path / "meant"), "cpu"))
    torch.testing.assert_close(_logprobs(config_of(str(tmp_path / "stored"), "cpu")), expected, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(gpu_build, "measure", _stream_few_rows)
    with an_fp8_gpu(monkeypatch):
        found = _logprobs(replace(config_of(str(tmp_path / "stored")), dtype="float16"))
    assert float((found.exp() - expected.exp()).abs().sum()) / 2 < 0.01


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [
        ("channel", "float16", 0.01),
        ("fp8-block", "float16", 0.01),
        ("tensor", "bfloat16", 0.1),
    ],
)
def test_a_checkpoint_of_eight_bits_gives_the_probabilities_of_the_numbers_it_stands_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, dtype: str, tolerance: float
) -> None:
    """On a CPU exactly. A GPU rounds inputs to 8 bits too, where it has such products: those make bfloat16.

    Layers as wide as other tests draw them multiply the rounding of their inputs: the variation were 0.5.
    """
    model = make_model("llama2", hidden_size=128, intermediate_size=128)
    model.save_pretrained(tmp_path / "meant")
    tensors = {name: tensor / 4 if "proj" in name else tensor for name, tensor in model.state_dict().items()}
    stored, meant = fp8_checkpoints.quantize_layers(tensors, kind, kept=("layers.0.mlp.down_proj",))
    _save(tmp_path, stored, meant, fp8_checkpoints.CONFIGS[kind])
    expected = _logprobs(config_of(str(tmp_path / "meant"), "cpu"))
    assert torch.equal(_logprobs(config_of(str(tmp_path / "stored"), "cpu")), expected)
    with an_fp8_gpu(monkeypatch):
        found = _logprobs(replace(config_of(str(tmp_path / "stored")), dtype=dtype))
    assert float((found.exp() - expected.exp()).abs().sum()) / 2 < tolerance


@pytest.mark.skipif(HAS_GPU, reason="the library's product, which a GPU would be asked for too, makes no float16")
@pytest.mark.parametrize("name", ["llama2", "gemma2"])
def test_our_products_of_eight_bits_give_the_probabilities_of_the_definition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By an engine that is the same otherwise; what is off is a rounding that another order of a sum turns."""
    make_model(name, hidden_size=128, intermediate_size=128).save_pretrained(tmp_path)
    config = replace(config_of(str(tmp_path)), dtype="float16", quantization="fp8")
    monkeypatch.setattr(resolve, "_why_not_fp8", lambda *_: None)
    monkeypatch.setattr(gpu_build, "measure", _stream_all)
    # Interpreted, a program for each output takes its time.
    monkeypatch.setattr(streamed_linear, "to_fp8", to_fp8)
    with an_fp8_gpu(monkeypatch):
        found = _logprobs(config)
        monkeypatch.setattr(StreamedLinear, "multiply", _multiply_by_definition)
        expected = _logprobs(config)
    assert float((found.exp() - expected.exp()).abs().sum()) / 2 < 0.01


def _multiply_by_definition(
    linear: StreamedLinear, x: torch.Tensor, way: Way, out: torch.Tensor | None = None
) -> torch.Tensor:
    y = by_definition(x, linear._weight, linear._bias)
    return y if out is None else out.copy_(y)


def _stream_all(linears: Sequence[StreamedLinear], runtime: CudaRuntime) -> None:
    for linear in linears:
        linear.ways = (Way.TILES,) * len(linear.rows)


def _save(
    folder: Path, stored: dict[str, torch.Tensor], meant: dict[str, torch.Tensor], quantization: dict[str, Any]
) -> None:
    """Write a quantized checkpoint beside the one, in the folder `meant`, whose configuration it has otherwise."""
    (folder / "stored").mkdir()
    for name, saved in (("stored", stored), ("meant", meant)):
        save_file(saved, folder / name / "model.safetensors")
    fields = json.loads((folder / "meant" / "config.json").read_text())
    (folder / "stored" / "config.json").write_text(json.dumps(fields | {"quantization_config": quantization}))


def _counted(method: Callable[..., Any], calls: Counter[str]) -> Callable[..., Any]:
    """Count the calls of a method that came to something."""

    def counted(*args: Any) -> Any:
        found = method(*args)
        calls[method.__name__] += method.__name__ == "lend" or found is not None
        return found

    return counted


def _logprobs(config: EngineConfig, adapter: AdapterRef | None = None) -> torch.Tensor:
    """Return the log-probabilities of all tokens after a prompt of three chunks."""
    prompt = max(random_prompts(5, longest=40), key=len)[:14]
    asked = greedy("r", prompt, 1, adapter=None if adapter is None else adapter.digest)
    asked = replace(asked, params=replace(asked.params, num_logprobs=1 << 20))
    engine = build_engine(replace(config, max_num_seqs=1, max_batched_tokens=6), [] if adapter is None else [adapter])
    ((emission,),) = emissions_of(engine, [asked]).values()
    (entry,) = emission.logprobs
    return torch.tensor([logprob for _, logprob in sorted(entry.top)])


def _stream_few_rows(linears: Sequence[StreamedLinear], runtime: CudaRuntime) -> None:
    for linear in linears:
        linear.ways = tuple(Way.TILES if rows <= 4 else Way.LIBRARY for rows in linear.rows)


def test_what_a_grammar_forces_is_a_chunk_beside_recorded_decodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with a CPU on which every token is drawn."""
    matcher = pytest.importorskip("llguidance").LLMatcher  # not on every machine that has a GPU
    folder = write_chat_model(tmp_path / "chat")
    grammar = matcher.grammar_from_regex("[ab]forced[cd]")
    params = SamplingParams(max_tokens=20, temperature=0.0, grammar=grammar)
    jumping, plain = Request(request_id=RequestId("a"), prompt_ids=(5, 6, 7), params=params), greedy("b", (9, 8), 4)
    drawn = replace(jumping, params=replace(params, num_logprobs=0))
    expected = run_engine(build_engine(config_of(str(folder), "cpu")), [drawn, plain])
    replays = Replays(monkeypatch)
    engine = build_engine(config_of(str(folder)))
    assert run_engine(engine, [jumping, plain]) == expected
    assert engine.snapshot().counters.forced_tokens >= 5
    assert replays.are_there
    assert replays.waits == []
