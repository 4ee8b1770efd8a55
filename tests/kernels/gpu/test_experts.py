"""Mixtures of experts against the reference in float64: any geometry, any choice, rows alone and in company."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.experts import launch, row_kernel
from kernels.experts import routing as expert_routing
from kernels.experts.reference import choose_experts, multiply_by_experts
from kernels.gated_activation.reference import Activation
from kernels.streamed_linear.layout import GROUP
from kernels.streamed_linear.reference import Matrix, from_int4, to_fp8, to_int4
from tests.kernels.gpu.conftest import DEVICE, DTYPES, SHORT, assert_near, randn
from tests.kernels.gpu.held_up import Before
from tests.oracles.plain_matrices import from_fp8


def few_logits(rows: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of which many are equal, of either sign, and some are zeros of either sign."""
    return (randn(rows, experts, dtype=torch.float32) * 2).round().div(2).to(dtype)


class Mixture:
    """A mixture whose products are of numbers near 1."""

    def __init__(self, experts: int, hidden: int, inner: int, dtype: torch.dtype, *, has_biases: bool = False) -> None:
        self.gate_up = (randn(experts, 2 * inner, hidden, dtype=torch.float32) / hidden**0.5).to(dtype)
        self.down = (randn(experts, hidden, inner, dtype=torch.float32) / inner**0.5).to(dtype)
        self.counts = expert_routing.counters(experts, DEVICE)
        self.biases: tuple[torch.Tensor, torch.Tensor] | None = None
        if has_biases:
            self.biases = randn(experts, 2 * inner, dtype=dtype), randn(experts, hidden, dtype=dtype)
        self.matrices: tuple[Matrix, Matrix] = (self.gate_up.flatten(0, 1), self.down.flatten(0, 1))

    def multiply(
        self,
        x: torch.Tensor,
        logits: torch.Tensor,
        chosen: int,
        *,
        is_normed: bool = True,
        activation: Activation = "silu",
        decodes: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Multiply by the kernels, and see to it that what they count by is left as it was."""
        options = {"chosen": chosen, "is_normed": is_normed, "activation": activation, "decodes": decodes}
        found = launch.multiply_by_experts(x, logits, *self.matrices, self.counts, biases=self.biases, **options)
        assert found.dtype == x.dtype
        assert not self.counts.any()
        return found

    def check(
        self, logits: torch.Tensor, chosen: int, *, is_normed: bool = True, activation: Activation = "silu"
    ) -> None:
        """Compare with the definition."""
        x = randn(len(logits), self.down.shape[1], dtype=logits.dtype)
        found = self.multiply(x, logits, chosen, is_normed=is_normed, activation=activation)
        experts, weights = choose_experts(logits, chosen, is_normed=is_normed)
        gate_up, down = self.gate_up.double(), self.down.double()
        biases = self.biases and (self.biases[0].double(), self.biases[1].double())
        assert_near(found, multiply_by_experts(x.double(), experts, weights, gate_up, down, activation, biases))
        if biases is None:
            choice = expert_routing.choose_experts(logits, chosen, self.counts, is_normed=is_normed)
            own = *self.matrices, self.counts
            again = launch.multiply_by_chosen(x, choice.experts, choice.weights, *own, activation=activation)
            assert torch.equal(again, found)
            assert not self.counts.any()


@settings(deadline=None, max_examples=12)
@given(
    rows=st.integers(1, 40),
    experts=st.integers(1, 20),
    part=st.floats(0, 1),
    hidden=st.integers(1, 90),
    inner=st.integers(1, 90),
    is_normed=st.booleans(),
    activation=st.sampled_from(get_args(Activation)),
    has_biases=st.booleans(),
)
def test_any_geometry(
    rows: int,
    experts: int,
    part: float,
    hidden: int,
    inner: int,
    is_normed: bool,
    activation: Activation,
    has_biases: bool,
) -> None:
    chosen = 1 + int(part * (min(experts, 16) - 1))
    mixture = Mixture(experts, hidden, inner, torch.float32, has_biases=has_biases)
    mixture.check(few_logits(rows, experts, torch.float32), chosen, is_normed=is_normed, activation=activation)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "experts", "chosen", "inner"), [(1, 4, 1, 704), (2, 60, 6, 22), (9, 20, 8, 88), (70, 5, 3, 130)]
)
def test_types_and_sizes_that_no_tile_divides(
    dtype: torch.dtype, rows: int, experts: int, chosen: int, inner: int
) -> None:
    Mixture(experts, 40, inner, dtype).check(few_logits(rows, experts, dtype), chosen)


@pytest.mark.parametrize("height", [16, 64, 128])
def test_tiles_of_every_height(height: int) -> None:
    """Those that prompts get on a GPU, which few rows do not."""
    rows, experts = 150, 3
    mixture, logits = Mixture(experts, 64, 48, torch.bfloat16), few_logits(rows, experts, torch.bfloat16)
    cut = launch.ExpertCut(block_m=height, block_n=64, block_k=32, neighbours=4, num_warps=4, num_stages=2)
    x = randn(rows, 64, dtype=torch.bfloat16)
    routing = expert_routing.choose_experts(logits, 2, mixture.counts, is_normed=True, tile=height)
    gate_up, down = mixture.matrices
    inner = launch.expert_product(x, gate_up, routing, cut, activation="silu")
    found = launch.add_up(launch.expert_product(inner, down, routing, cut), routing.weights)
    chosen = choose_experts(logits, 2, is_normed=True)
    assert_near(
        found, multiply_by_experts(x.double(), *chosen, mixture.gate_up.double(), mixture.down.double(), "silu")
    )


@pytest.mark.parametrize("rows", [1, 2, 9])
@pytest.mark.parametrize("is_int4", [False, True])
@pytest.mark.parametrize("dtype", SHORT)
def test_weights_of_few_bits(rows: int, is_int4: bool, dtype: torch.dtype) -> None:
    hidden, inner = (GROUP, 2 * GROUP) if is_int4 else (40, 50)
    mixture = Mixture(5, hidden, inner, dtype, has_biases=True)
    if is_int4:
        found = [to_int4(matrix) for matrix in mixture.matrices]
        meant = [from_int4(matrix) for matrix in found]
    else:
        found = [to_fp8(matrix.float()) for matrix in mixture.matrices]
        meant = [from_fp8(matrix) for matrix in found]
    mixture.gate_up, mixture.down = meant[0].view_as(mixture.gate_up), meant[1].view_as(mixture.down)
    mixture.matrices = (found[0], found[1])
    mixture.check(few_logits(rows, 5, dtype), 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (8, 2), (60, 4), (512, 16)])
@pytest.mark.parametrize("is_normed", [False, True])
def test_the_choice_is_the_reference_s(dtype: torch.dtype, experts: int, chosen: int, is_normed: bool) -> None:
    """Also among equals, of which there are many."""
    logits = few_logits(11, experts, dtype)
    found = expert_routing.choose_experts(logits, chosen, expert_routing.counters(experts, DEVICE), is_normed=is_normed)
    expected, weights = choose_experts(logits, chosen, is_normed=is_normed)
    assert torch.equal(found.experts, expected)
    torch.testing.assert_close(found.weights, weights)


@settings(deadline=None, max_examples=20)
@given(
    rows=st.integers(1, 30),
    experts=st.integers(1, 12),
    chosen=st.integers(1, 12),
    height=st.sampled_from([1, 3, 16]),
    is_one_for_all=st.booleans(),
)
def test_tiles_hold_every_pair_once_with_its_expert(
    rows: int, experts: int, chosen: int, height: int, is_one_for_all: bool
) -> None:
    chosen = min(chosen, experts)
    logits = few_logits(1 if is_one_for_all else rows, experts, torch.float32).expand(rows, -1).contiguous()
    counts = expert_routing.counters(experts, DEVICE)
    found = expert_routing.choose_experts(logits, chosen, counts, is_normed=True, tile=height)
    assert found.slots is not None
    assert found.tiles is not None
    assert found.num_tiles is not None
    assert int(found.num_tiles) <= len(found.tiles)
    of_pairs, slots, seen = found.experts.flatten(), found.slots.flatten(), []
    for expert, first, end in found.tiles[: int(found.num_tiles)].tolist():
        pairs = slots[first : min(first + height, end)].tolist()
        assert len(pairs) > 0
        assert {int(of_pairs[pair]) for pair in pairs} == {expert}
        seen += pairs
    assert sorted(seen) == list(range(rows * chosen))
    assert not counts.any()


@pytest.mark.parametrize("rows", [2, 33])
def test_all_rows_choose_the_same(rows: int) -> None:
    logits = few_logits(1, 40, torch.float32).expand(rows, -1).contiguous()
    Mixture(40, 64, 48, torch.float32).check(logits, 3)


@pytest.mark.parametrize("rows", [2, 33])
def test_a_row_that_is_no_number_harms_no_other(rows: int) -> None:
    mixture, logits = Mixture(9, 64, 48, torch.float32), few_logits(rows, 9, torch.float32)
    x = randn(rows, 64, dtype=torch.float32)
    expected = mixture.multiply(x, logits, 2)
    x[1], logits[1] = torch.nan, torch.nan
    found = mixture.multiply(x, logits, 2)
    assert found[1].isnan().all()
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[2:], expected[2:])


@pytest.mark.parametrize("num_decodes", [5, 21])
def test_rows_that_fill_a_batch_up_are_in_no_tile(num_decodes: int) -> None:
    """Others are what they are without them; rows of several tokens come behind those of one."""
    mixture, logits = Mixture(40, 64, 48, torch.float32), few_logits(21, 40, torch.float32)
    x, decodes = randn(21, 64, dtype=torch.float32), torch.ones(num_decodes, 4, dtype=torch.int64, device=DEVICE)
    decodes[3:5, 2] = 0
    others = [*range(3), *range(5, 21)]
    expected = mixture.multiply(x, logits, 2)[others]
    found = mixture.multiply(x, logits, 2, decodes=decodes)
    assert torch.equal(found[others], expected)
    num_met = len(choose_experts(logits[others], 2, is_normed=True)[0].unique())
    routing = expert_routing.choose_experts(logits, 2, mixture.counts, is_normed=True, tile=16, decodes=decodes)
    again = expert_routing.sort_by_expert(routing.experts, routing.weights, mixture.counts, tile=16, decodes=decodes)
    for each in (routing, again):
        assert each.num_tiles is not None
        assert int(each.num_tiles) == num_met


def test_a_row_does_not_depend_on_its_company() -> None:
    mixture, logits = Mixture(6, 100, 70, torch.float32), few_logits(21, 6, torch.float32)
    x, order = randn(21, 100, dtype=torch.float32), torch.randperm(21, device=DEVICE)
    together = mixture.multiply(x, logits, 3)
    assert torch.equal(mixture.multiply(x[order], logits[order], 3), together[order])


def test_no_rows() -> None:
    mixture = Mixture(4, 16, 16, torch.bfloat16)
    x, logits = mixture.down.new_empty(0, 16), mixture.down.new_empty(0, 4)
    assert mixture.multiply(x, logits, 2).shape == (0, 16)
    choice = logits.new_empty(0, 2, dtype=torch.int32), logits.new_empty(0, 2, dtype=torch.float32)
    found = launch.multiply_by_chosen(x, *choice, *mixture.matrices, mixture.counts, activation="silu")
    assert found.shape == (0, 16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="programs are held up where they are interpreted")
def test_what_the_kernel_before_writes_is_read_once_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """What adds the experts up reads weights and the choice before: the kernel before has waited for that."""
    down = row_kernel.expert_down_kernel

    class HeldUp:
        def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
            def run(x: torch.Tensor, *others: object, **options: object) -> None:
                before = Before()
                with pytest.MonkeyPatch.context() as patch, before.writes(x):
                    patch.setattr(row_kernel, "let_begin", before.let_begin)
                    patch.setattr(row_kernel, "wait", before.wait)
                    down[grid](x, *others, **options)

            return run

    monkeypatch.setattr(launch, "expert_down_kernel", HeldUp())
    Mixture(6, 40, 30, torch.float32).check(few_logits(2, 6, torch.float32), 3)


@pytest.mark.parametrize("rows", [3, 64, 8192])
@pytest.mark.parametrize(("experts", "chosen"), [(8, 2), (128, 8), (512, 10)])
def test_as_many_tiles_are_there_as_any_choice_needs(rows: int, experts: int, chosen: int) -> None:
    pairs, height = rows * chosen, launch.usual_cut(rows, chosen, experts, 2).block_m
    most = expert_routing.max_tiles(pairs, experts, height)
    # Every expert that can has one pair more than whole tiles.
    some = min(pairs, experts)
    assert most == some + (pairs - some) // height
