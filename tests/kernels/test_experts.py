"""Mixtures of experts, held against what one row at a time computes."""

from __future__ import annotations

import ctypes

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.experts.reference import (
    GROUP_ROWS,
    choose_experts,
    max_groups,
    multiply_by_experts,
    sort_by_expert,
)
from kernels.gated_activation.reference import activate_and_multiply
from kernels.packed_linear.reference import to_panels
from kernels.packed_linear_int4.reference import E2M1, beside_panels, to_int4_panels, to_levels
from kernels.packed_linear_int8.reference import quantize_rows, to_int8_panels
from kernels.program import Pool
from tests.kernels.conftest import DTYPES, assert_near


@pytest.mark.parametrize("is_normed", [False, True])
def test_the_likeliest_experts_are_chosen_and_weighed(is_normed: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, -1.0, -1.0, -1.0]])

    experts, weights = choose_experts(logits, 2, is_normed=is_normed)

    assert experts.tolist() == [[1, 3], [0, 1]]
    shares = logits.softmax(-1).gather(1, experts.long())
    expected = shares / shares.sum(-1, keepdim=True) if is_normed else shares
    assert torch.allclose(weights, expected)


def test_a_row_is_the_weighed_sum_of_its_experts() -> None:
    generator = torch.Generator().manual_seed(7)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((5, 8), (6, 2 * 12, 8), (6, 8, 12)))
    experts, weights = choose_experts(torch.randn(5, 6, generator=generator), 3, is_normed=False)

    y = multiply_by_experts(x, experts, weights, gate_up, down, "silu")

    for row, mine, shares in zip(range(5), experts.tolist(), weights, strict=True):
        parts = [down[e] @ activate_and_multiply(gate_up[e] @ x[row], "silu") for e in mine]
        expected = torch.stack(parts).mul(shares.unsqueeze(-1)).sum(0)
        assert torch.allclose(y[row], expected, rtol=1e-5, atol=1e-5)


def test_no_rows_add_nothing() -> None:
    experts, weights = choose_experts(torch.empty(0, 4), 2, is_normed=True)

    y = multiply_by_experts(torch.empty(0, 8), experts, weights, torch.ones(4, 6, 8), torch.ones(4, 8, 3), "silu")

    assert y.shape == (0, 8)


def choose(pool: Pool, logits: torch.Tensor, chosen: int, *, is_normed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose natively; one row more than asked stays as it was."""
    rows, count = logits.shape
    shares = torch.empty(rows, count)
    experts = torch.full((rows + 1, chosen), -7, dtype=torch.int32)
    weights = torch.full((rows + 1, chosen), -7.0)
    tensors = (logits, shares, experts, weights)
    pool.call("choose_experts", logits.dtype, rows, tensors, (count, chosen, is_normed))
    assert experts[rows].eq(-7).all()
    assert weights[rows].eq(-7).all()
    return experts[:rows], weights[:rows]


def sort(pool: Pool, experts: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, chosen = experts.shape
    of_pairs, places = torch.empty(rows * chosen, dtype=torch.int64), torch.empty_like(experts)
    groups = torch.full((max_groups(rows * chosen, count), 3), 7, dtype=torch.int32)
    starts = torch.empty(count, dtype=torch.int32)
    tensors = (experts, of_pairs, places, groups, starts)
    pool.call("sort_by_expert", torch.float32, rows, tensors, (count, chosen))
    return of_pairs, places, groups


COUNTS = st.integers(1, 40).flatmap(lambda count: st.tuples(st.just(count), st.integers(1, count)))


@settings(deadline=None, max_examples=60)
@given(
    counts=COUNTS,
    rows=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    is_normed=st.booleans(),
    has_ties=st.booleans(),
    seed=st.integers(0, 99),
)
def test_the_kernel_chooses_as_the_reference(
    pool: Pool, counts: tuple[int, int], rows: int, dtype: torch.dtype, is_normed: bool, has_ties: bool, seed: int
) -> None:
    count, chosen = counts
    logits = torch.randn(rows, count, generator=torch.Generator().manual_seed(seed)) * 4
    # Whole numbers are often the same, and exactly so.
    logits = (logits.round() if has_ties else logits).to(dtype)
    experts, weights = choose(pool, logits, chosen, is_normed=is_normed)
    wanted, shares = choose_experts(logits, chosen, is_normed=is_normed)
    assert torch.equal(experts, wanted)
    torch.testing.assert_close(weights, shares, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_has_no_finite_weight_and_chooses_somebody(pool: Pool, bad: float) -> None:
    logits = torch.randn(3, 20)
    logits[1, 5] = bad
    experts, weights = choose(pool, logits, 4, is_normed=True)
    assert not weights[1].isfinite().any()
    assert len(set(experts[1].tolist())) == 4
    assert experts[1].ge(0).all()
    assert experts[1].lt(20).all()
    assert weights[[0, 2]].isfinite().all()


@settings(deadline=None, max_examples=60)
@given(counts=COUNTS, rows=st.integers(1, 60), seed=st.integers(0, 99))
def test_the_kernel_sorts_as_the_reference(pool: Pool, counts: tuple[int, int], rows: int, seed: int) -> None:
    count, chosen = counts
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(count, generator=generator)[:chosen] for _ in range(rows)]).to(torch.int32)
    for found, expected in zip(sort(pool, experts, count), sort_by_expert(experts, count), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [GROUP_ROWS - 1, GROUP_ROWS, 2 * GROUP_ROWS + 1])
def test_many_rows_of_one_expert_are_several_groups(pool: Pool, rows: int) -> None:
    experts = torch.full((rows, 1), 2, dtype=torch.int32)
    found = sort(pool, experts, 4)
    for one, other in zip(found, sort_by_expert(experts, 4), strict=True):
        assert torch.equal(one, other)
    assert found[2][:, 2].sum() == rows


Laid = tuple[str, tuple[torch.Tensor, ...], tuple[int, ...]]


def laid_out(kind: str, weights: torch.Tensor) -> tuple[torch.Tensor, Laid]:
    """Lay out weights [experts, out, in]; returns what they then stand for, and what a kernel takes."""
    _, out, depth = weights.shape
    if kind == "int8":
        int8, scales = zip(*(quantize_rows(weight) for weight in weights), strict=True)
        panels = torch.stack([to_int8_panels(matrix) for matrix in int8])
        numbers = torch.stack(int8).float() * torch.stack(scales).unsqueeze(-1)
        return numbers, ("packed_linear_int8", (panels, torch.stack(scales)), (panels.shape[2] * 4, out))
    if kind == "int4":
        parts = [to_levels(weight) for weight in weights]
        panels = torch.stack([to_int4_panels(levels) for levels, _, _ in parts])
        beside = tuple(torch.stack([beside_panels(part[index]) for part in parts]) for index in (1, 2))
        levels, scales, zeros = (torch.stack(part) for part in zip(*parts, strict=True))
        steps = levels.unflatten(-1, (scales.shape[-1], -1)).float() - zeros.unsqueeze(-1).float()
        group = depth // scales.shape[-1]
        return (steps * scales.unsqueeze(-1)).flatten(-2), (
            "packed_linear_int4",
            (panels, *beside),
            (depth, out, group),
        )
    if kind == "mxfp4":
        levels = (weights.float() * 4).round().long() % 16
        scales = torch.rand(len(weights), out, depth // 32).add(0.5)
        panels = torch.stack([to_int4_panels(matrix.to(torch.uint8)) for matrix in levels])
        numbers = torch.tensor(E2M1)[levels].unflatten(-1, (-1, 32)) * scales.unsqueeze(-1)
        beside_each = torch.stack([beside_panels(each) for each in scales])
        return numbers.flatten(-2), ("packed_linear_mxfp4", (panels, beside_each), (depth, out, 32))
    return weights.float(), ("packed_linear", (torch.stack([to_panels(weight) for weight in weights]),), (depth, out))


def multiply_grouped(
    pool: Pool, x: torch.Tensor, groups: torch.Tensor, laid: Laid, num_experts: int, biases: torch.Tensor | None
) -> torch.Tensor:
    """Multiply pairs [pairs, in] natively; one row more than asked stays as it was."""
    kernel, tensors, sizes = laid
    inputs: tuple[torch.Tensor, ...] = (x,)
    if kernel == "packed_linear_int8":
        q = torch.zeros(len(x), sizes[0], dtype=torch.int8)
        inputs = q, torch.zeros(len(x))
        pool.call("quantize_rows", x.dtype, len(x), (x, *inputs), (x.shape[1], sizes[0]))
    y = torch.full((len(x) + 1, sizes[1]), 7.0, dtype=x.dtype)
    own = (*inputs, *tensors, biases, y)
    strides = torch.zeros(6, 2, dtype=torch.int64)
    for index, tensor in enumerate(own):
        if tensor is not None:
            is_matrix = len(inputs) <= index <= len(inputs) + len(tensors)
            strides[index, int(is_matrix)] = tensor[0].nbytes
    beside = [None] * (6 - len(own))
    padding = [0] * (6 - len(sizes))
    pool.call(f"grouped_{kernel}", x.dtype, len(x), (*own, *beside, groups, strides), (*sizes, *padding, num_experts))
    assert y[len(x)].eq(7).all()
    return y[: len(x)]


def test_products_may_have_biases_of_their_expert() -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = ((5, 8), (6, 24, 8), (6, 8, 12), (6, 24), (6, 8))
    x, gate_up, down, up_bias, down_bias = (torch.randn(shape, generator=generator) for shape in shapes)
    experts, weights = choose_experts(torch.randn(5, 6, generator=generator), 3, is_normed=True)

    y = multiply_by_experts(x, experts, weights, gate_up, down, "clamped", (up_bias, down_bias))

    for row, mine, shares in zip(range(5), experts.tolist(), weights, strict=True):
        inner = [activate_and_multiply(gate_up[e] @ x[row] + up_bias[e], "clamped") for e in mine]
        parts = [down[e] @ each + down_bias[e] for e, each in zip(mine, inner, strict=True)]
        expected = torch.stack(parts).mul(shares.unsqueeze(-1)).sum(0)
        assert torch.allclose(y[row], expected, rtol=1e-5, atol=1e-5)


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(["plain", "int8", "int4", "mxfp4"]),
    dtype=st.sampled_from(DTYPES),
    count=st.integers(1, 12),
    rows=st.one_of(st.integers(1, 20), st.sampled_from([70, 600])),
    chooses=st.sampled_from(["anybody", "one", "the last two"]),
    out=st.integers(1, 80),
    depth=st.sampled_from([32, 64, 96, 128]),
    has_biases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_products_are_those_of_each_expert(
    pool: Pool,
    kind: str,
    dtype: torch.dtype,
    count: int,
    rows: int,
    chooses: str,
    out: int,
    depth: int,
    has_biases: bool,
    seed: int,
) -> None:
    """Experts without rows, all rows with one of them, more rows than are multiplied at once."""
    generator = torch.Generator().manual_seed(seed)
    least = {"anybody": 0, "one": count - 1, "the last two": max(0, count - 2)}[chooses]
    experts = torch.randint(least, count, (rows, 1), generator=generator, dtype=torch.int32)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    weights = torch.randn(count, out, depth, generator=generator).to(dtype)
    numbers, laid = laid_out(kind, weights)
    of_pairs, _, groups = sort_by_expert(experts, count)
    biases = torch.randn(count, out, generator=generator).to(dtype) if has_biases else None
    found = multiply_grouped(pool, x[of_pairs], groups, laid, count, biases)
    inputs = x.float()
    if kind == "int8":
        q, scales = quantize_rows(x)
        inputs = q.float() * scales.unsqueeze(-1)
    expected = torch.stack([numbers[experts[row, 0]] @ inputs[row] for row in of_pairs.tolist()])
    if biases is not None:
        expected += biases[experts[of_pairs, 0]].float()
    assert_near(found, expected)


@pytest.mark.parametrize("rows", [1, 7, GROUP_ROWS + 1])
def test_how_many_units_there_are_no_routing_changes(pool: Pool, rows: int) -> None:
    """A thread that comes late counts them when the next layer has been routed, and would wait for some for ever."""
    _, (kernel, tensors, sizes) = laid_out("plain", torch.randn(4, 40, 32))
    x, y, strides = torch.randn(rows, 32), torch.empty(rows, 40), torch.zeros(6, 2, dtype=torch.int64)
    count, found = torch.tensor([rows]), set()
    for experts in (torch.zeros(rows, 1, dtype=torch.int32), torch.arange(rows, dtype=torch.int32).view(-1, 1) % 4):
        _, _, groups = sort_by_expert(experts, 4)
        beside = (None, None, groups, strides)
        op = pool.op(f"grouped_{kernel}", torch.float32, count, (x, *tensors, None, y, *beside), (*sizes, *[0] * 4, 4))
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)(op.kernel)
        found.add(call(ctypes.addressof(op), -1))
    assert len(found) == 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "chosen", "width"), [(1, 1, 16), (3, 2, 7), (5, 8, 2050)])
def test_the_sum_is_weighed(pool: Pool, dtype: torch.dtype, rows: int, chosen: int, width: int) -> None:
    products = torch.randn(rows * chosen, width).to(dtype)
    places = torch.randperm(rows * chosen).to(torch.int32).view(rows, chosen)
    weights = torch.rand(rows, chosen)
    y = torch.full((rows + 1, width), 7.0, dtype=dtype)
    pool.call("add_experts", dtype, rows, (products, places, weights, y), (width, chosen))
    expected = (products[places.long()].double() * weights.double().unsqueeze(-1)).sum(1)
    assert_near(y[:rows], expected)
    assert y[rows].eq(7).all()
