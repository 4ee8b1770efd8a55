"""Norm, activation and rotation against their references in float64."""

from __future__ import annotations

from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.add_rms_norm import launch as norm_launch
from kernels.add_rms_norm.reference import add_rms_norm
from kernels.embedding import reference
from kernels.embedding.launch import put_drawn, take_rows
from kernels.gated_activation import launch as gate_launch
from kernels.gated_activation.reference import Activation, activate_and_multiply
from kernels.rope_kv_write import launch as rope_launch
from kernels.rope_kv_write.reference import rope_kv_write
from kernels.row_quantization.launch import empty_rounded, quantize_rows
from tests.kernels.gpu.conftest import DEVICE, DTYPES, assert_near, randn

BLOCKS, BLOCK_TOKENS = 5, 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_delta", [False, True])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 100), (2, 4096)])
def test_a_norm_is_that_of_the_sum(dtype: torch.dtype, has_delta: bool, rows: int, width: int) -> None:
    x, delta, weight = randn(rows, width, dtype=dtype), randn(rows, width, dtype=dtype), randn(width, dtype=dtype)
    total = x + delta if has_delta else x.clone()
    found = norm_launch.add_rms_norm(x, delta if has_delta else None, weight, 1e-6)
    assert torch.equal(x, total)
    assert_near(found, add_rms_norm(total.double(), None, weight.double(), 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_by_a_weight_in_float32_is_rounded_once(dtype: torch.dtype) -> None:
    x, weight = randn(3, 100, dtype=dtype), randn(100, dtype=torch.float32)
    found = norm_launch.add_rms_norm(x, None, weight, 1e-6)
    once = add_rms_norm(x.double(), None, weight.double(), 1e-6).to(dtype)
    assert_near(found, once)
    # Rounded twice, a third of them would be another number.
    assert dtype == torch.float32 or (found == once).float().mean() > 0.95


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 1024), (2, 1500)])
def test_the_second_half_is_gated_by_the_first(
    dtype: torch.dtype, rows: int, width: int, activation: Activation
) -> None:
    gate_up = randn(rows, 2 * width, dtype=dtype) * 4
    found = gate_launch.activate_and_multiply(gate_up, activation)
    # Far below zero the terms of a GELU cancel out.
    assert_near(found, activate_and_multiply(gate_up.double(), activation), at_least=1.0)


@pytest.mark.parametrize("held", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 1), (3, 100), (2, 9000)])
def test_rows_are_rounded_on_the_way_as_by_a_launch_of_their_own(held: torch.dtype, rows: int, width: int) -> None:
    x, delta, gate_up = (randn(rows, size, dtype=torch.float32) for size in (width, width, 2 * width))
    weight = randn(width, dtype=torch.float32)
    if rows > 2:
        # A row of zeros, and one that is not finite.
        x[0] = delta[0] = gate_up[0] = 0
        x[1, 3] = gate_up[1, 3] = torch.nan
    of_norm, of_gate = ([part.fill_(7) for part in empty_rounded(x, held)] for _ in range(2))
    h = norm_launch.add_rms_norm(x.clone(), delta, weight, 1e-6, of_norm)
    gated = gate_launch.activate_and_multiply(gate_up, "silu", of_gate)
    torch.testing.assert_close(h, norm_launch.add_rms_norm(x, delta, weight, 1e-6), equal_nan=True)
    torch.testing.assert_close(gated, gate_launch.activate_and_multiply(gate_up, "silu"), equal_nan=True)
    for found, meant in ((of_norm, h), (of_gate, gated)):
        for part, expected in zip(found, quantize_rows(meant, held), strict=True):
            torch.testing.assert_close(part.float(), expected.float(), atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms_are", ["absent", "of the dtype", "float32", "of each token"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "rotary_dim"),
    [
        (4, 2, 64, 64),
        (14, 2, 80, 80),
        (1, 1, 96, 96),
        (3, 3, 128, 96),
        (2, 1, 48, 10),
        (16, 1, 256, 256),
        (4, 1, 512, 128),
    ],
)
def test_heads_are_rotated_and_written(
    dtype: torch.dtype, norms_are: str, heads: int, kv_heads: int, dim: int, rotary_dim: int
) -> None:
    tokens = 7
    qkv = randn(tokens, (heads + 2 * kv_heads) * dim, dtype=dtype)
    cos_sin = randn(tokens, 2, dim, dtype=dtype)
    cos_sin[:, :, rotary_dim:] = torch.tensor([1.0, 0.0], device=DEVICE)[:, None]
    norm_dtype = torch.float32 if norms_are == "float32" else dtype
    norms = None if norms_are == "absent" else (randn(dim, dtype=norm_dtype), randn(dim, dtype=norm_dtype))
    if norms_are == "of each token":
        first, second = randn(tokens, 2 * dim, dtype=dtype).split(dim, dim=1)
        norms = first, second
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS, device=DEVICE)[:tokens]
    written = torch.tensor([True] * 5 + [False] * 2)
    caches = [torch.full((BLOCKS, BLOCK_TOKENS, kv_heads, dim), 7.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    expected_caches = [cache.double() for cache in caches]
    options = {"cos_sin": cos_sin.double(), "eps": 1e-6, "norms": norms and tuple(part.double() for part in norms)}
    expected = rope_kv_write(
        qkv=qkv.double(),
        k_cache=(k := torch.zeros_like(expected_caches[0])),
        v_cache=(v := torch.zeros_like(expected_caches[1])),
        slots=slots,
        rotary_dim=rotary_dim,
        **options,
    )
    for cache, full in zip(expected_caches, (k, v), strict=True):
        cache.flatten(0, 1)[slots[:5]] = full.flatten(0, 1)[slots[:5]]
    # The last two only fill up the batch.
    found = rope_launch.rope_kv_write(
        qkv=qkv,
        cos_sin=cos_sin,
        norms=norms,
        eps=1e-6,
        k_cache=caches[0],
        v_cache=caches[1],
        slots=slots.where(written.to(DEVICE), -1),
        rotary_dim=rotary_dim,
    )
    assert_near(found, expected)
    assert_near(caches[0], expected_caches[0])
    assert torch.equal(caches[1].double(), expected_caches[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3, 1), (50, 2, 40), (9, 5000)])
def test_rows_are_taken(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = randn(*shape, dtype=dtype)
    for count in (0, 1, 7):
        indices = torch.randint(0, len(x), (count,), device=DEVICE)
        assert torch.equal(take_rows(x, indices), x[indices])


@settings(deadline=None, max_examples=20)
@given(
    tokens=st.lists(st.tuples(st.sampled_from([-7, 0, 3, 900]), st.integers(0, 4)), min_size=0, max_size=300),
    drawn=st.lists(st.integers(-1, 1000), min_size=5, max_size=5),
)
def test_what_was_drawn_is_put_where_it_is_pending(tokens: list[tuple[int, int]], drawn: list[int]) -> None:
    ids = torch.tensor([token for token, _ in tokens], dtype=torch.int64, device=DEVICE)
    rows = torch.tensor([[9, 9, 9, row] for _, row in tokens], dtype=torch.int64, device=DEVICE).view(-1, 4)
    last = torch.tensor(drawn, device=DEVICE)
    expected = ids.clone()
    reference.put_drawn(expected, rows, last, -7)
    put_drawn(ids, rows, last, -7)
    assert torch.equal(ids, expected)
    assert [max(0, drawn[row] if token == -7 else token) for token, row in tokens] == ids.tolist()
