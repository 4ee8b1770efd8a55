from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.cache.tier_fetch import TierFetch
from tests.engine.cache.test_tiers import names_of

CHAIN = names_of(tuple(range(24)))
"""Of six blocks."""

brought = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(sorted).filter(lambda ends: ends[0] < ends[1])


@given(ends=brought, num_common=st.integers(0, 6), num_other=st.integers(0, 3))
def test_it_brings_what_a_chain_has_in_common_with_its_own(ends: list[int], num_common: int, num_other: int) -> None:
    before, after = ends
    fetch = TierFetch(CHAIN[:after], before, [], [], 1.0)
    other = (*range(4 * num_common), *[24] * 4 * num_other)
    num_brought = max(0, min(num_common, after) - before)
    assert fetch.num_brought(names_of(other), is_whole=False) == num_brought
    assert fetch.num_brought(names_of(other), is_whole=True) == (num_brought if num_common >= after else 0)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_nothing_comes_of_what_is_given_up(is_given_up: bool) -> None:
    fetch = TierFetch(CHAIN, 0, [], [], 1.0, is_given_up)
    assert fetch.num_brought(CHAIN, is_whole=False) == (0 if is_given_up else 6)
