from __future__ import annotations

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

from kernels.program import Pool
from kernels.selective_scan.reference import selective_scan
from tests.kernels.conftest import DTYPES, assert_near

CASES = {
    "a token": (1, 1, 4, 1, 64, 128),
    "tokens of many rows": (5, 1, 4, 2, 16, 16),
    "a few tokens": (2, 7, 6, 3, 48, 32),
    "a prompt": (1, 150, 4, 1, 64, 128),
    "prompts of many rows": (3, 33, 4, 2, 32, 64),
    "rows that do not fill a part": (2, 40, 2, 2, 112, 48),
    "the widest states": (1, 64, 2, 1, 128, 256),
    "the narrowest states": (1, 11, 3, 1, 16, 16),
}
"""Rows, tokens, heads, groups, width of heads and of states."""


def inputs(case: str, dtype: torch.dtype, *, steepness: float = 1.0) -> list[torch.Tensor]:
    rows, tokens, heads, groups, head_dim, state_dim = CASES[case]
    torch.manual_seed(5)
    x = torch.randn(rows, tokens, heads, head_dim).to(dtype)
    b, c = (torch.randn(rows, tokens, groups, state_dim).to(dtype) for _ in range(2))
    dt, a, d = torch.rand(rows, tokens, heads), -steepness * torch.rand(heads), torch.randn(heads)
    return [x, dt, a, b, c, d, torch.randn(rows, heads, head_dim, state_dim)]


def computed(
    pool: Pool, x: torch.Tensor, dt: torch.Tensor, a: torch.Tensor, *rest: torch.Tensor | None
) -> torch.Tensor:
    """Call the kernel; of `x`, `b` and `c` each token's numbers must lie together."""
    b, c, d, state = rest
    assert b is not None
    assert c is not None
    y = torch.full(x.shape, torch.nan, dtype=x.dtype)
    sizes = (*x.shape[1:], *b.shape[2:], *(part.stride(1) for part in (x, b, c)))
    pool.call("selective_scan", x.dtype, len(x), (x, dt.contiguous(), a, b, c, d, state, y), sizes)
    return y


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_is_the_reference(pool: Pool, dtype: torch.dtype, case: str) -> None:
    *given, state = inputs(case, dtype)
    exact = state.double()
    expected = selective_scan(*(part.double() for part in given), exact)
    assert_near(computed(pool, *given, state), expected)
    assert_near(state, exact)


@pytest.mark.parametrize("steepness", [0.0, 1e-3, 30.0, 1e4])
def test_states_decay_hardly_or_at_once(pool: Pool, steepness: float) -> None:
    *given, state = inputs("a prompt", torch.float32, steepness=steepness)
    # A token after which nothing is left of the past.
    given[1][0, 70] = 1e6
    exact = state.double()
    expected = selective_scan(*(part.double() for part in given), exact)
    y = computed(pool, *given, state)
    for found, meant in ((y[:, :70], expected[:, :70]), (y[:, 70:], expected[:, 70:]), (state, exact)):
        assert_near(found, meant)


def test_inputs_need_not_be_added_to_outputs(pool: Pool) -> None:
    for case in ("a few tokens", "a prompt"):
        *given, state = inputs(case, torch.float32)
        given[5] = torch.zeros_like(given[5])
        same = state.clone()
        assert torch.equal(computed(pool, *given[:5], None, same), computed(pool, *given, state))
        assert torch.equal(same, state)


@pytest.mark.parametrize("case", ["a few tokens", "a prompt"])
def test_numbers_of_a_token_may_lie_among_others(pool: Pool, case: str) -> None:
    x, dt, a, b, c, *rest, state = inputs(case, torch.bfloat16)
    mixed = torch.cat([part.flatten(2) for part in (x, b, c)], dim=-1)
    parts = mixed.split([part.shape[2] * part.shape[3] for part in (x, b, c)], dim=-1)
    views = [part.unflatten(-1, like.shape[2:]) for part, like in zip(parts, (x, b, c), strict=True)]
    same = state.clone()
    found = computed(pool, views[0], dt, a, *views[1:], *rest, same)
    assert torch.equal(found, computed(pool, x, dt, a, b, c, *rest, state))
    assert torch.equal(same, state)


def test_rows_know_nothing_of_each_other(pool: Pool) -> None:
    for case in ("tokens of many rows", "prompts of many rows"):
        x, dt, a, b, c, d, state = inputs(case, torch.float32)
        alone = [
            computed(pool, *(part[i : i + 1] for part in (x, dt)), a, b[i : i + 1], c[i : i + 1], d, state[i].clone())
            for i in range(len(x))
        ]
        assert torch.equal(computed(pool, x, dt, a, b, c, d, state), torch.cat(alone))


def test_a_text_in_parts_is_the_text(pool: Pool) -> None:
    x, dt, a, b, c, d, state = inputs("a prompt", torch.float32)
    exact = state.double()
    expected = selective_scan(*(part.double() for part in (x, dt, a, b, c, d)), exact)
    parts = [
        computed(pool, *(part[:, i:j] for part in (x, dt)), a, *(part[:, i:j] for part in (b, c)), d, state)
        for i, j in ((0, 1), (1, 64), (64, 145), (145, 149), (149, 150))
    ]
    assert_near(torch.cat(parts, dim=1), expected)
    assert_near(state, exact)


def test_what_is_not_finite_is_not_hidden(pool: Pool) -> None:
    for case, token in (("a few tokens", 2), ("a prompt", 7)):
        x, dt, a, b, c, d, state = inputs(case, torch.float32)
        b[0, token, 0, 3] = torch.nan
        y = computed(pool, x, dt, a, b, c, d, state)
        assert y[0, token:, 0].isnan().all()
        assert y[0, :token, 0].isfinite().all()
        x, dt, a, b, c, d, state = inputs(case, torch.float32)
        dt[0, token, 0] = torch.nan
        assert computed(pool, x, dt, a, b, c, d, state.clone())[0, token:, 0].isnan().all()
        state[0, 0, 0, 0] = torch.inf
        assert not computed(pool, x, dt, a, b, c, d, state)[0, :, 0, 0].isfinite().any()


def test_the_reference_is_the_chunked_scan_of_transformers() -> None:
    x, dt, a, b, c, d, state = inputs("prompts of many rows", torch.float32)
    y, theirs = modeling_mamba2.mamba2_chunk_scan(
        x, dt, a, b, c, chunk_size=16, D=d, initial_states=state, return_final_states=True
    )
    assert_near(selective_scan(x, dt, a, b, c, d, state), y)
    assert_near(state, theirs)


def test_the_reference_is_the_step_of_transformers() -> None:
    x, dt, a, b, c, d, state = inputs("tokens of many rows", torch.float32)
    heads, head_dim, state_dim = state.shape[1:]
    theirs = state.clone()
    y = modeling_mamba2.mamba2_selective_state_update(
        theirs,
        x[:, 0],
        dt[:, 0, :, None].expand(-1, -1, head_dim),
        a[:, None, None].expand(heads, head_dim, state_dim),
        b[:, 0],
        c[:, 0],
        d[:, None].expand(heads, head_dim),
    )
    assert_near(selective_scan(x, dt, a, b, c, d, state)[:, 0], y)
    assert_near(state, theirs)
