from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from deployments.channel.token_frames import (
    FrameError,
    coalesce,
    decode_body,
    decode_length,
    encode_frame,
)
from engine.request import Emission, FinishReason, RequestId, TokenLogprobs

EMISSIONS = st.lists(
    st.builds(
        Emission,
        request_id=st.text(st.characters(codec="utf-8"), min_size=1, max_size=50).map(RequestId),
        token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(tuple),
        finish_reason=st.none() | st.sampled_from(FinishReason),
        num_cached_tokens=st.integers(0, (1 << 32) - 1),
        pooled=st.none() | st.binary(min_size=1, max_size=40),
        error=st.none() | st.text(st.characters(codec="utf-8"), max_size=50),
    ),
    max_size=8,
)
LOGPROBS = st.floats(width=32, allow_nan=False, max_value=0)
ENTRIES = st.lists(
    st.builds(
        TokenLogprobs,
        LOGPROBS,
        st.lists(st.tuples(st.integers(0, 2**31 - 1), LOGPROBS), max_size=5).map(tuple),
        st.integers(1, 2**31),
    ),
    max_size=6,
).map(tuple)
SCORED = st.builds(Emission, request_id=st.just(RequestId("r")), logprobs=ENTRIES, prompt_logprobs=ENTRIES).map(
    lambda emission: [emission]
)


@given(EMISSIONS | SCORED)
def test_what_goes_in_comes_out(emissions: list[Emission]) -> None:
    frame = encode_frame(emissions)
    assert decode_length(frame[:4]) == len(frame) - 4
    assert decode_body(frame[4:]) == tuple(emissions)


@given(EMISSIONS | SCORED, st.data())
def test_a_frame_that_is_cut_short_is_refused(emissions: list[Emission], data: st.DataObject) -> None:
    body = encode_frame(emissions)[4:]
    place = data.draw(st.integers(0, len(body) - 1))
    try:
        decode_body(body[:place])
    except FrameError:
        return
    raise AssertionError("decoded half a frame")


@given(EMISSIONS, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_frame_decodes_to_emissions_or_is_refused(
    emissions: list[Emission], damage: list[tuple[int, int]]
) -> None:
    body = bytearray(encode_frame(emissions)[4:])
    for position, value in damage:
        body[position % len(body)] = value
    try:
        decoded = decode_body(bytes(body))
    except FrameError:
        return
    assert encode_frame(decoded)[4:] == bytes(body)


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    try:
        decoded = decode_body(encode_frame(())[4:8] + garbage)
    except FrameError:
        return
    assert encode_frame(decoded)[8:] == garbage


@given(EMISSIONS)
def test_coalescing_keeps_every_token_of_every_request_in_order(emissions: list[Emission]) -> None:
    joined = coalesce(emissions)
    assert len({emission.request_id for emission in joined}) == len(joined)
    for emission in joined:
        parts = [part for part in emissions if part.request_id == emission.request_id]
        assert emission.token_ids == tuple(token_id for part in parts for token_id in part.token_ids)
        assert emission.finish_reason == parts[-1].finish_reason
