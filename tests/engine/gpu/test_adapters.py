"""The GPU's part of adapters in a step, against the CPU's operators, on whatever device is here."""

from __future__ import annotations

import pytest
import torch

from adapters.peft_format import WHOLE_MODEL
from adapters.weights import AdapterWeights, Columns, Extras, RawProjection, build_weights
from engine.errors import EngineError
from engine.gpu.adapters import Reach, TritonLora
from engine.gpu.tabled_adapter import TabledAdapter
from engine.lora import AdapterSegment, LoraBatch
from kernels.recording import Launch, recording
from tests.engine.gpu.host_runtime import runtime_here

HIDDEN, VOCAB, INNER, LAYERS, MAX_RANK, MAX_SEGMENTS = 32, 40, 24, 2, 8, 5
TOKENS, SAMPLES = 9, 4
TOKEN_SPANS = {"plain": (0, 2), "own": (2, 3), "products": (3, 7), "norms": (7, 8)}
SAMPLE_SPANS = {"plain": (0, 1), "own": (1, 2), "norms": (2, 3)}
"""Of the products' segment, which is a chunk of a prompt, nothing is drawn; the last row of both is the base's."""


def raw(rank: int, width: int, depth: int) -> RawProjection:
    return RawProjection(a=torch.randn(rank, depth), b=torch.randn(width, rank), scaling=0.5)


def gains() -> Columns:
    return Columns(gain=torch.rand(HIDDEN) + 0.5, shift=torch.zeros(HIDDEN))


@pytest.fixture
def sources() -> dict[str, AdapterWeights]:
    torch.manual_seed(0)
    plain = {(1, "up_proj"): raw(3, INNER, HIDDEN)}
    biased = Columns(gain=torch.rand(INNER), shift=torch.randn(INNER))
    own = {name: torch.randn(VOCAB, HIDDEN) for name in ("embed_tokens", "lm_head")}
    ends = {(WHOLE_MODEL, "embed_tokens"): raw(5, HIDDEN, VOCAB), (WHOLE_MODEL, "lm_head"): raw(8, VOCAB, HIDDEN)}
    norms = {(WHOLE_MODEL, "norm"): gains(), (0, "input_layernorm"): gains(), (1, "post_attention_layernorm"): gains()}
    return {
        "plain": build_weights(plain, torch.float32, Extras(columns={(1, "up_proj"): biased})),
        "own": build_weights(plain, torch.float32, Extras(matrices=own)),
        "products": build_weights({**plain, **ends}, torch.float32),
        "norms": build_weights({}, torch.float32, Extras(columns=norms)),
    }


def segments(adapters: dict[str, AdapterWeights], spans: dict[str, tuple[int, int]]) -> list[AdapterSegment]:
    return [
        AdapterSegment(weights=adapters[name], start=start, end=end)
        for name, (start, end) in spans.items()
        if name in adapters
    ]


def change(lora: LoraBatch | TritonLora) -> list[torch.Tensor]:
    """Do everything that a step does, each to numbers of its own."""
    device = runtime_here().device if isinstance(lora, TritonLora) else torch.device("cpu")
    generator = torch.Generator().manual_seed(1)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    ids = torch.randint(0, VOCAB, (TOKENS,), generator=generator).to(device)
    x, first, second = (numbers(TOKENS, HIDDEN) for _ in range(3))
    last, gate_up, logits = numbers(SAMPLES, HIDDEN), numbers(TOKENS, 2 * INNER), numbers(SAMPLES, VOCAB)
    lora.embed(ids, x)
    lora.norm(0, "input_layernorm", first)
    lora.norm(1, "post_attention_layernorm", second)
    lora.apply_fused(1, ("gate_proj", "up_proj"), x, gate_up, (INNER, INNER))
    lora.norm(WHOLE_MODEL, "norm", last)
    lora.head(last, logits)
    return [tensor.cpu() for tensor in (x, first, second, gate_up, last, logits)]


def tabled(sources: dict[str, AdapterWeights], page_bytes: int = 0) -> dict[str, AdapterWeights]:
    device = runtime_here().device
    adapters = {name: TabledAdapter.of(source, LAYERS, page_bytes=page_bytes) for name, source in sources.items()}
    return {
        name: adapter.to(device, [torch.full((page_bytes,), 255, dtype=torch.uint8, device=device) for _ in range(num)])
        for name, adapter in adapters.items()
        for num in [adapter.num_pages]
    }


@pytest.mark.parametrize("page_bytes", [0, VOCAB * HIDDEN * 4])
@pytest.mark.parametrize(
    "names", [("plain", "own", "products", "norms"), ("own",), ("products",), ("plain", "norms"), ("plain",)]
)
def test_every_part_of_a_step_is_the_cpu_s(
    sources: dict[str, AdapterWeights], names: tuple[str, ...], page_bytes: int
) -> None:
    """In one buffer, and in pages that hold not a number else."""
    chosen = {name: sources[name] for name in names}
    lora = TritonLora(runtime_here(), MAX_SEGMENTS, MAX_RANK, TOKENS)
    on_device = tabled(chosen, page_bytes)
    lora.fill(segments(on_device, TOKEN_SPANS), segments(on_device, SAMPLE_SPANS))
    expected = change(LoraBatch(segments(chosen, TOKEN_SPANS), segments(chosen, SAMPLE_SPANS)))
    for found, known in zip(change(lora), expected, strict=True):
        torch.testing.assert_close(found, known, atol=1e-4, rtol=1e-4)


def test_what_was_recorded_changes_nothing_until_it_is_told_of_adapters(sources: dict[str, AdapterWeights]) -> None:
    lora = TritonLora(runtime_here(), MAX_SEGMENTS, MAX_RANK, TOKENS)
    lora.expect(MAX_SEGMENTS)
    for found, known in zip(change(lora), change(LoraBatch(())), strict=True):
        assert torch.equal(found, known)


@pytest.mark.parametrize(("names", "reach"), [((), Reach.NOTHING), (("plain",), Reach.LINEAR_MODULES)])
def test_a_step_without_such_an_adapter_launches_nothing_for_it(
    sources: dict[str, AdapterWeights], names: tuple[str, ...], reach: Reach
) -> None:
    lora = TritonLora(runtime_here(), MAX_SEGMENTS, MAX_RANK, TOKENS)
    lora.fill(segments(tabled({name: sources[name] for name in names}), TOKEN_SPANS))
    assert lora.reach == reach
    states, logits = torch.zeros(SAMPLES, HIDDEN), torch.zeros(SAMPLES, VOCAB)
    launches: list[Launch]
    with recording() as launches:
        lora.embed(torch.zeros(TOKENS, dtype=torch.int64), torch.zeros(TOKENS, HIDDEN))
        lora.norm(0, "input_layernorm", torch.zeros(TOKENS, HIDDEN))
        lora.norm(WHOLE_MODEL, "norm", states)
        lora.head(states, logits)
    assert launches == []


def test_all_of_an_adapter_is_counted(sources: dict[str, AdapterWeights]) -> None:
    """Each matrix begins where the widest load may, and so does each row of B: what lies between is counted."""
    up, ends = 5 * INNER, 3 * (HIDDEN + VOCAB)
    spare = {"plain": up, "own": up, "products": up + ends, "norms": 0}
    for name, source in sources.items():
        between = TabledAdapter.of(source, LAYERS).num_bytes - source.num_bytes - 4 * spare[name]
        assert 0 <= between <= 16 * 20


def test_no_part_lies_in_two_pages_and_one_that_is_longer_keeps_the_adapter_out_of_them(
    sources: dict[str, AdapterWeights],
) -> None:
    largest = VOCAB * HIDDEN * 4
    for name, source in sources.items():
        laid_out = TabledAdapter.of(source, LAYERS, page_bytes=largest)
        assert laid_out.num_pages == -(-laid_out.num_bytes // largest) > (name == "own")
        assert laid_out.num_bytes >= TabledAdapter.of(source, LAYERS).num_bytes
    assert TabledAdapter.of(sources["own"], LAYERS, page_bytes=largest - 16).num_pages == 0
    assert TabledAdapter.of(sources["own"], LAYERS).num_pages == 0
    assert TabledAdapter.of(sources["own"], LAYERS, page_bytes=largest).num_pages == 3


def test_halves_of_wider_numbers_are_not_taken_for_numbers() -> None:
    """The lower half of 1.00034, as float16, is NaN."""
    gain = torch.full((HIDDEN,), 0x3F807E00, dtype=torch.int32).view(torch.float32)
    assert gain.view(torch.float16).isnan().any()
    for shift, is_finite in ((0.0, True), (torch.inf, False)):
        columns = {(WHOLE_MODEL, "norm"): Columns(gain=gain, shift=torch.full((HIDDEN,), shift))}
        source = build_weights({(0, "q_proj"): raw(2, HIDDEN, HIDDEN)}, torch.float16, Extras(columns=columns))
        assert TabledAdapter.of(source, LAYERS).is_finite() == is_finite


def test_states_that_leave_the_engine_can_be_normed(sources: dict[str, AdapterWeights]) -> None:
    known = sources["norms"].extras.columns[(WHOLE_MODEL, "norm")]
    found = tabled(sources)["norms"].extras.columns[(WHOLE_MODEL, "norm")]
    assert torch.equal(found.gain.cpu(), known.gain)
    assert torch.equal(found.shift.cpu(), known.shift)


def test_an_adapter_that_was_not_laid_out_is_a_bug(sources: dict[str, AdapterWeights]) -> None:
    with pytest.raises(EngineError, match="laid out"):
        TritonLora(runtime_here(), MAX_SEGMENTS, MAX_RANK, TOKENS).fill(segments(sources, TOKEN_SPANS))
