from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.logprob_bytes import pack_logprobs, unpack_logprobs
from engine.request import TokenLogprobs

LOGPROBS = st.floats(width=32, allow_nan=False, max_value=0)
ENTRIES = st.lists(
    st.builds(
        TokenLogprobs,
        LOGPROBS,
        st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS), max_size=5).map(tuple),
        st.integers(1, 2**31),
    ),
    max_size=6,
)


@given(ENTRIES)
def test_what_is_packed_comes_out(entries: list[TokenLogprobs]) -> None:
    assert unpack_logprobs(pack_logprobs(entries)) == tuple(entries)


@given(ENTRIES.filter(bool), st.data())
def test_bytes_that_end_too_early_are_refused_or_fewer(entries: list[TokenLogprobs], data: st.DataObject) -> None:
    packed = pack_logprobs(entries)
    ends = {len(pack_logprobs(entries[:count])): count for count in range(len(entries))}
    length = data.draw(st.integers(0, len(packed) - 1))
    if length in ends:
        assert len(unpack_logprobs(packed[:length])) == ends[length]
        return
    with pytest.raises(ValueError, match="end within"):
        unpack_logprobs(packed[:length])


def test_infinity_travels_and_ids_out_of_bounds_do_not() -> None:
    assert unpack_logprobs(pack_logprobs([TokenLogprobs(-math.inf)])) == (TokenLogprobs(-math.inf),)
    with pytest.raises(struct.error):
        pack_logprobs([TokenLogprobs(0.0, ((2**31, 0.0),))])
