"""Mixtures with weights in MXFP4, against the numbers that these stand for."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from engine.loading.mxfp4 import Mxfp4Weight
from kernels.architecture import pretending
from kernels.experts import launch, routing
from kernels.experts.reference import choose_experts, multiply_by_experts
from kernels.gated_activation.reference import Activation
from kernels.mxfp4.reference import MAX_EXPONENT, Mxfp4Matrix, pack_mxfp4
from kernels.mxfp4.row_kernel import mxfp4_down_kernel
from tests.kernels.gpu.conftest import DEVICE, DTYPES, assert_near, randn

USUAL_OUTPUTS = {name: getattr(launch, name) for name in ("GATE_UP_OUTPUTS", "DOWN_OUTPUTS")}


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each have much to do where they are interpreted, one after the other."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(launch, "GATE_UP_OUTPUTS", 32)
        monkeypatch.setattr(launch, "DOWN_OUTPUTS", 128)


def drawn(out: int, depth: int, dtype: torch.dtype) -> Mxfp4Weight:
    """Draw a weight of all levels and usual exponents."""
    blocks = torch.randint(0, 256, (out, depth // 2), dtype=torch.uint8, device=DEVICE)
    chosen = torch.randint(122, 127, (out, depth // 32), dtype=torch.uint8, device=DEVICE)
    return Mxfp4Weight(blocks=blocks, exponents=chosen, dtype=dtype)


def packed(weight: Mxfp4Weight) -> Mxfp4Matrix:
    return pack_mxfp4(weight.blocks, weight.exponents, weight.dtype)


class Mixture:
    """A mixture of gpt-oss' kind, and the numbers that its weights stand for."""

    def __init__(
        self,
        experts: int,
        hidden: int,
        inner: int,
        dtype: torch.dtype,
        *,
        has_biases: bool = True,
        activation: Activation = "clamped",
    ) -> None:
        weights = drawn(experts * 2 * inner, hidden, dtype), drawn(experts * hidden, inner, dtype)
        self.gate_up, self.down = (packed(weight) for weight in weights)
        self.numbers = weights[0].dense().view(experts, -1, hidden), weights[1].dense().view(experts, -1, inner)
        self.biases: tuple[torch.Tensor, torch.Tensor] | None = None
        if has_biases:
            self.biases = randn(experts, 2 * inner, dtype=dtype), randn(experts, hidden, dtype=dtype)
        self.counts = routing.counters(experts, DEVICE)
        self.dtype, self.hidden, self.experts, self.activation = dtype, hidden, experts, activation

    def multiply(self, x: torch.Tensor, logits: torch.Tensor, chosen: int) -> torch.Tensor:
        return launch.multiply_by_experts(
            x, logits, self.gate_up, self.down, self.counts, chosen=chosen, is_normed=True,
            activation=self.activation, biases=self.biases,
        )  # fmt: skip

    def meant(self, x: torch.Tensor, logits: torch.Tensor, chosen: int) -> torch.Tensor:
        experts, weights = choose_experts(logits, chosen, is_normed=True)
        gate_up, down = (numbers.double() for numbers in self.numbers)
        biases = self.biases and (self.biases[0].double(), self.biases[1].double())
        return multiply_by_experts(x.double(), experts, weights, gate_up, down, self.activation, biases)

    def check(self, rows: int, chosen: int) -> None:
        """Compare with the definition; inputs are such that products are near 1, and gates seldom clamped."""
        x = (randn(rows, self.hidden, dtype=torch.float32) / self.hidden**0.5).to(self.dtype)
        logits = randn(rows, self.experts, dtype=self.dtype)
        assert_near(self.multiply(x, logits, chosen), self.meant(x, logits, chosen))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
def test_all_levels_under_all_exponents_are_exact(rows: int, dtype: torch.dtype) -> None:
    """One input of 1 among zeros: what comes out is a weight; by the kernel of few rows, and by tiles."""
    depth, exponents = 32, torch.arange(2, MAX_EXPONENT + 1, dtype=torch.uint8, device=DEVICE)
    level = torch.arange(16, dtype=torch.uint8, device=DEVICE)
    blocks = (level | level.flip(0) << 4).expand(len(exponents), 16).contiguous()
    weight = Mxfp4Weight(blocks=blocks, exponents=exponents.unsqueeze(1), dtype=dtype)
    # Of down, as what gate and up make is known: an inner number of 1 where that of an input is.
    width = len(exponents)
    for place in (0, 1, 7, 8, 30, 31):
        x = torch.zeros(rows, depth, dtype=dtype, device=DEVICE)
        x[:, place] = 1
        matrix, logits = packed(weight), torch.zeros(rows, 1, dtype=dtype, device=DEVICE)
        counts = routing.counters(1, DEVICE)
        if rows <= launch.MAX_ROWS:
            found = _by_rows(x, matrix, logits, width)
        else:
            tiled = routing.choose_experts(logits, 1, counts, is_normed=True, tile=16)
            cut = launch.usual_cut(rows, 1, 1, dtype.itemsize)
            found = launch.expert_product(x, matrix, tiled, cut)
        assert torch.equal(found, weight.dense()[:, place].expand(rows, -1))


def _by_rows(x: torch.Tensor, matrix: Mxfp4Matrix, logits: torch.Tensor, width: int) -> torch.Tensor:
    """Multiply by the second kernel for few rows alone."""
    out = torch.empty(len(x), width, dtype=x.dtype, device=DEVICE)
    experts, shares = torch.zeros_like(logits, dtype=torch.int32), torch.ones_like(logits, dtype=torch.float32)
    mxfp4_down_kernel[(len(x), -(-width // 4))](
        x.view(torch.int32), experts, shares, matrix.held, matrix.units, out, out, width, GROUPS=1, CHOSEN=1,
        HAS_BIAS=False, BLOCK_C=1, BLOCK_N=4, BLOCK_G=1, num_warps=4, OVERLAPS=False,
    )  # fmt: skip
    return out


@settings(deadline=None, max_examples=8)
@given(
    rows=st.integers(1, 40),
    experts=st.integers(1, 12),
    part=st.floats(0, 1),
    hidden=st.integers(1, 6),
    inner=st.integers(1, 6),
    has_biases=st.booleans(),
    activation=st.sampled_from(["clamped", "silu"]),
)
def test_any_geometry(
    rows: int, experts: int, part: float, hidden: int, inner: int, has_biases: bool, activation: Activation
) -> None:
    """Also of depths that 128 does not divide, and experts that nobody has chosen."""
    chosen = 1 + int(part * (min(experts, 8) - 1))
    Mixture(
        experts, 32 * hidden, 32 * inner, torch.float32, has_biases=has_biases, activation=activation
    ).check(rows, chosen)  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "hidden", "inner"),
    [(1, 3, 2, 96, 160), (2, 7, 5, 224, 32), (9, 3, 2, 192, 96), (70, 5, 3, 64, 160), (150, 2, 1, 32, 64)],
)
@pytest.mark.parametrize("gpu", ["sm_80", "sm_90"])
def test_types_and_sizes_that_no_tile_divides(
    gpu: str,
    dtype: torch.dtype,
    rows: int,
    experts: int,
    chosen: int,
    hidden: int,
    inner: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a Hopper GPU, 16-bit inputs of a block are summed apart."""
    # A row or two go by several tiles too.
    monkeypatch.setattr(launch, "ROW_GROUPS", 2)
    with pretending(gpu):
        Mixture(experts, hidden, inner, dtype).check(rows, chosen)


@pytest.mark.parametrize("rows", [1, 5])
def test_inputs_as_many_as_those_of_gpt_oss(rows: int) -> None:
    Mixture(1, 2880, 32, torch.bfloat16).check(rows, 1)
    Mixture(1, 32, 2880, torch.bfloat16).check(rows, 1)


def test_outputs_as_many_a_program_as_a_gpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, usual in USUAL_OUTPUTS.items():
        monkeypatch.setattr(launch, name, usual)
    Mixture(5, 64, 32, torch.bfloat16).check(1, 3)


@pytest.mark.parametrize("rows", [2, 20])
def test_a_row_that_is_no_number_harms_no_other(rows: int) -> None:
    mixture = Mixture(6, 64, 32, torch.float32)
    x, logits = randn(rows, 64, dtype=torch.float32), randn(rows, 6, dtype=torch.float32)
    expected = mixture.multiply(x, logits, 2)
    x[1], logits[1] = torch.nan, torch.nan
    found = mixture.multiply(x, logits, 2)
    assert found[1].isnan().all()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2:], expected[2:])


@pytest.mark.parametrize("rows", [1, 5])
def test_a_matrix_of_numbers_may_stand_beside_one_of_few_bits(rows: int) -> None:
    """A checkpoint may have left some of a layer as they were."""
    mixture = Mixture(4, 64, 96, torch.float32)
    mixture.down = mixture.numbers[1].flatten(0, 1)  # type: ignore[assignment]
    mixture.check(rows, 2)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_row_or_two_in_bfloat16_multiply_no_matrices(rows: int) -> None:
    """So that the interpreter can, too; pairs of inputs are taken apart by their bits there and nowhere else."""
    Mixture(5, 96, 64, torch.bfloat16).check(rows, 3)
