"""The GPU's part of adapters in a step, against the CPU's operators, on whatever device is here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random

import pytest
import torch

from adapters.tensor_names import WHOLE_MODEL
from adapters.weights import AdapterWeights
from engine.adapter_tables import ENTRIES
from engine.errors import EngineError
from engine.gpu.adapters import AdapterScope, TritonLora
from engine.gpu.runtime import CudaRuntime
from engine.gpu.tabled_adapter import TabledAdapter
from engine.lora import AdapterSegment, LinearProducts, LoraBatch
from kernels import overlap
from kernels.add_rms_norm.launch import add_rms_norm
from kernels.recording import Launch, recording
from tests.adapters.handmade import packed
from tests.engine.gpu.handmade_adapters import HIDDEN, INNER, LAYERS, MAX_RANK, VOCAB, make_sources, raw, tabled
from tests.kernels.gpu.conftest import DEVICE

MAX_SEGMENTS = 5
TOKENS, SAMPLES = 9, 4
TOKEN_SPANS = {"plain": (0, 2), "own": (2, 3), "products": (3, 7), "norms": (7, 8)}
SAMPLE_SPANS = {"plain": (0, 1), "own": (1, 2), "norms": (2, 3)}
"""Of the products' segment, which is a chunk of a prompt, nothing is drawn; the last row of both is the base's."""


@pytest.fixture
def sources() -> dict[str, AdapterWeights]:
    return make_sources()


def segments(adapters: dict[str, AdapterWeights], spans: dict[str, tuple[int, int]]) -> list[AdapterSegment]:
    return [
        AdapterSegment(weights=adapters[name], start=start, end=end)
        for name, (start, end) in spans.items()
        if name in adapters
    ]


def change(lora: LoraBatch | TritonLora) -> list[torch.Tensor]:
    """Do everything that a step does, each to numbers of its own."""
    device = DEVICE if isinstance(lora, TritonLora) else torch.device("cpu")
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator).to(device)
    x, first, second = (numbers(TOKENS, HIDDEN) for _ in range(3))
    last, gate_up, logits = numbers(SAMPLES, HIDDEN), numbers(TOKENS, 2 * INNER), numbers(SAMPLES, VOCAB)
    lora.embed(ids, x)
    lora.norm(0, "input_layernorm", first)
    lora.norm(1, "post_attention_layernorm", second)
    lora.multiply(lambda _: gate_up, x, 1, ("gate_proj", "up_proj"), (INNER, INNER))
    lora.norm(WHOLE_MODEL, "norm", last)
    lora.head(last, logits)
    return [tensor.cpu() for tensor in (x, first, second, gate_up, last, logits)]


@pytest.mark.parametrize("page_bytes", [0, VOCAB * HIDDEN * 4])
@pytest.mark.parametrize(
    "names", [("plain", "own", "products", "norms"), ("own",), ("products",), ("plain", "norms"), ("plain",)]
)
def test_every_part_of_a_step_is_the_cpu_s(
    sources: dict[str, AdapterWeights], names: tuple[str, ...], page_bytes: int
) -> None:
    """In one buffer, and in pages that hold not a number else."""
    chosen = {name: sources[name] for name in names}
    lora = TritonLora(CudaRuntime(DEVICE), MAX_SEGMENTS, MAX_RANK, TOKENS)
    on_device = tabled(chosen, page_bytes)
    lora.fill(segments(on_device, TOKEN_SPANS), segments(on_device, SAMPLE_SPANS))
    expected = change(LoraBatch(segments(chosen, TOKEN_SPANS), segments(chosen, SAMPLE_SPANS)))
    for found, known in zip(change(lora), expected, strict=True):
        torch.testing.assert_close(found, known, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("start", "end"), [(0, TOKENS), (2, 5), (TOKENS - 1, TOKENS)])
def test_some_tokens_alone_get_what_they_get_among_all(
    sources: dict[str, AdapterWeights], start: int, end: int
) -> None:
    """With entries for modules of layers that few models have."""
    device = DEVICE
    module, x = "linear_attn.in_proj_qkv", torch.randn(TOKENS, HIDDEN, device=device)
    other = packed({(1, module): raw(3, INNER, HIDDEN)}, torch.float32)
    entries = (*ENTRIES, "conv.in_proj", module)
    laid_out = TabledAdapter.of(other, LAYERS, entries=entries).to(device)
    spans = [AdapterSegment(weights=laid_out, start=1, end=4), AdapterSegment(weights=laid_out, start=5, end=TOKENS)]
    lora = TritonLora(CudaRuntime(DEVICE), MAX_SEGMENTS, MAX_RANK, TOKENS, entries=entries)
    lora.fill(spans)

    def added(products: LinearProducts, of: torch.Tensor) -> torch.Tensor:
        nothing = torch.zeros(len(of), INNER, device=device)
        return products.multiply(lambda _: nothing, of, 1, (module,), (INNER,))

    projection = other.projection(1, module)
    expected = x.cpu() @ projection.a.T @ projection.b.T
    expected[[0, 4]] = 0
    torch.testing.assert_close(added(lora, x).cpu(), expected, atol=1e-4, rtol=1e-4)
    for _ in range(2):
        found = added(lora.of_tokens(start, end), x[start:end].contiguous())
        torch.testing.assert_close(found.cpu(), expected[start:end], atol=1e-4, rtol=1e-4)


def test_a_shrink_begins_before_its_product_and_has_ended_before_its_expand(
    sources: dict[str, AdapterWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    order: list[str] = []

    class Watched(CudaRuntime):
        @contextmanager
        def beside(self) -> Iterator[Callable[[], None]]:
            order.append("apart")
            yield lambda: order.append("joined")
            order.append("together")

    for name in ("lora_shrink", "lora_expand"):
        monkeypatch.setattr(f"engine.gpu.adapters.{name}", lambda *_, name=name, **__: order.append(name))
    lora = TritonLora(Watched(DEVICE), MAX_SEGMENTS, MAX_RANK, TOKENS)

    def product(x: torch.Tensor) -> torch.Tensor:
        order.append("product")
        return x

    lora.multiply(product, torch.zeros(TOKENS, HIDDEN), 0, ("o_proj",), (HIDDEN,))
    assert order == ["apart", "lora_shrink", "together", "product", "joined", "lora_expand"]


def test_a_replay_applies_the_adapters_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not those of the step before, of which a GPU's caches know: kernels look for adapters before they wait.

    Each time they lie elsewhere, or where another one was, and the same is launched without overlap.
    """
    has_gpu = torch.cuda.is_available()
    num_steps, num_products, width, dtype = (300, 12, 2048, torch.bfloat16) if has_gpu else (4, 2, 32, torch.float32)
    sources = [packed({(0, "o_proj"): raw(8, width, width)}, dtype) for _ in range(3)]
    laid_out = [TabledAdapter.of(source, num_layers=1) for source in sources]
    runtime = CudaRuntime(DEVICE)
    lora = TritonLora(runtime, max_segments=3, max_rank=8, max_tokens=3)
    x, gain = torch.randn(3, width, device=DEVICE).to(dtype), torch.ones(width, dtype=dtype, device=DEVICE)

    def run() -> torch.Tensor:
        h = x
        for _ in range(num_products):
            normed = add_rms_norm(h, None, gain, 1e-6)
            h = lora.multiply(torch.clone, normed, 0, ("o_proj",), (width,))
        return h

    lora.expect(3, AdapterScope.LINEAR_MODULES)
    replay, out = runtime.record(run)
    draw = Random(1)
    for _ in range(num_steps):
        some = [adapter.to(DEVICE) for adapter in draw.sample(laid_out, draw.randint(1, 3))]
        lora.fill([AdapterSegment(weights=weights, start=at, end=at + 1) for at, weights in enumerate(some)])
        replay()
        found = out.clone()
        with monkeypatch.context() as patch:
            patch.setattr(overlap, "IS_WANTED", False)
            expected = run()
        assert torch.equal(found, expected)


def test_what_was_recorded_changes_nothing_until_it_is_told_of_adapters(sources: dict[str, AdapterWeights]) -> None:
    lora = TritonLora(CudaRuntime(DEVICE), MAX_SEGMENTS, MAX_RANK, TOKENS)
    lora.expect(MAX_SEGMENTS)
    for found, known in zip(change(lora), change(LoraBatch(())), strict=True):
        assert torch.equal(found, known)


@pytest.mark.parametrize(("names", "scope"), [((), AdapterScope.NOTHING), (("plain",), AdapterScope.LINEAR_MODULES)])
def test_a_step_without_such_an_adapter_launches_nothing_for_it(
    sources: dict[str, AdapterWeights], names: tuple[str, ...], scope: AdapterScope
) -> None:
    lora = TritonLora(CudaRuntime(DEVICE), MAX_SEGMENTS, MAX_RANK, TOKENS)
    lora.fill(segments(tabled({name: sources[name] for name in names}), TOKEN_SPANS))
    assert lora.scope == scope
    states, logits = torch.zeros(SAMPLES, HIDDEN), torch.zeros(SAMPLES, VOCAB)
    launches: list[Launch]
    with recording() as launches:
        lora.embed(torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, HIDDEN))
        lora.norm(0, "input_layernorm", torch.zeros(TOKENS, HIDDEN))
        lora.norm(WHOLE_MODEL, "norm", states)
        lora.head(states, logits)
    assert launches == []


def test_an_adapter_that_was_not_laid_out_is_a_bug(sources: dict[str, AdapterWeights]) -> None:
    with pytest.raises(EngineError, match="laid out"):
        TritonLora(CudaRuntime(DEVICE), MAX_SEGMENTS, MAX_RANK, TOKENS).fill(segments(sources, TOKEN_SPANS))
