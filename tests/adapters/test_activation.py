from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.activation import activation_start


@given(prompt=st.lists(st.integers(0, 2)), invocation=st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_the_last_occurrence_counts(prompt: list[int], invocation: list[int]) -> None:
    starts = [at for at in range(len(prompt)) if prompt[at : at + len(invocation)] == invocation]
    assert activation_start(prompt, invocation) == (starts[-1] if starts else None)


@pytest.mark.parametrize(
    ("prompt", "invocation", "start"),
    [
        # The same bytes, in the middle of other tokens.
        ((0x01000000, 0x02000000, 0), (0x00020000, 0), None),
        ((0x00000001, 0x00000100, 0x00000001), (1,), 2),
        ((0x00000100, 0x00010000), (0x00000001,), None),
        ((1 << 31, 5), (1 << 31,), 0),
        ((1, 2), (), 0),
        ((), (), 0),
    ],
)
def test_tokens_are_compared_as_wholes(prompt: tuple[int, ...], invocation: tuple[int, ...], start: int | None) -> None:
    assert activation_start(prompt, invocation) == start
