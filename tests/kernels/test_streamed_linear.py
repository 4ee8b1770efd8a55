"""The definition of weights in 4 bits: near to what they were, zeros where those were, the same by any type."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from kernels.streamed_linear.layout import GROUP, LEVELS
from kernels.streamed_linear.reference import from_int4, streamed_linear, to_int4

DTYPES = [torch.bfloat16, torch.float16]


@settings(max_examples=30)
@given(
    out=st.integers(1, 5),
    groups=st.integers(1, 3),
    exponent=st.integers(-3, 3),
    shift=st.floats(-2, 2),
    dtype=st.sampled_from(DTYPES),
)
def test_a_weight_is_half_a_step_off_at_most(
    out: int, groups: int, exponent: int, shift: float, dtype: torch.dtype
) -> None:
    weight = ((torch.randn(out, groups * GROUP) + shift) * 10.0**exponent).to(dtype)
    weight[0, :3] = 0
    found = from_int4(to_int4(weight))
    assert found.dtype == dtype
    assert (found[0, :3] == 0).all()
    grouped = weight.float().view(out, groups, GROUP)
    span = grouped.amax(-1).clamp(min=0) - grouped.amin(-1).clamp(max=0)
    # Half a step, the scale's own rounding over all the levels, and that of the result.
    bound = span / LEVELS * (0.5 + LEVELS * 2.0**-8) + span * 2.0**-8
    assert ((found - weight).float().view(out, groups, GROUP).abs() <= bound.unsqueeze(-1)).all()


def test_inputs_lie_where_the_definition_says() -> None:
    weight = torch.arange(16.0).repeat(GROUP // 16).repeat(1, 2).half()
    weight[0, GROUP:] *= 3
    matrix = to_int4(weight)
    assert matrix.shape == (1, 2 * GROUP)
    assert matrix.scales.flatten().tolist() == [1, 3]
    assert matrix.zeros.flatten().tolist() == [0, 0]
    words = [sum(level << 4 * pair | level + 1 << 16 + 4 * pair for pair in range(4)) for level in range(0, 16, 2)]
    assert (matrix.held[0, :16].long() & 0xFFFFFFFF).tolist() == words * 2
    assert torch.equal(from_int4(matrix), weight)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_seen(bad: float) -> None:
    weight = torch.ones(2, GROUP, dtype=torch.float16)
    weight[1, 5] = bad
    found = streamed_linear(torch.ones(1, GROUP, dtype=torch.float16), to_int4(weight), None)
    assert found[0, 0] == GROUP
    assert not found[0, 1].isfinite()
