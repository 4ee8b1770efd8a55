from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.channel import token_frames
from deployments.channel.token_frames import (
    FrameError,
    coalesce,
    decode_body,
    decode_length,
    encode_frame,
    payload_bytes,
)
from engine.request import Emission, FinishReason, RequestId, TokenLogprobs

R1, R2 = RequestId("r1"), RequestId("r2")
EXAMPLE = """\
    2f000000 4146 04 00 01000000
    0200 ffff 03000000 00000000 00000000 01000000 02 00000000 00000000 00000000   7231 07000000
"""


def emission(request_id: str = "r1", **fields: object) -> Emission:
    return Emission(request_id=RequestId(request_id), **fields)


def test_the_example_in_the_documentation_is_a_frame() -> None:
    frame = bytes.fromhex(EXAMPLE)
    assert EXAMPLE in (token_frames.__doc__ or "")
    assert decode_length(frame[:4]) == len(frame) - 4 == 47
    expected = emission(token_ids=(7,), finish_reason=FinishReason.LENGTH, num_cached_tokens=3)
    assert decode_body(frame[4:]) == (expected,)
    assert encode_frame([expected]) == frame


@pytest.mark.parametrize(
    "wrong",
    [
        emission(request_id=""),
        emission(request_id="x" * 1025),
        emission(request_id="\ud800"),
        emission(token_ids=(-1,)),
        emission(token_ids=(1 << 31,)),
        emission(num_cached_tokens=-1),
        emission(num_cached_tokens=1 << 32),
        emission(num_accepted=-1),
        emission(num_rejected=1 << 32),
        emission(logprobs=(TokenLogprobs(0.0, ((1 << 31, 0.0),)),)),
    ],
)
def test_an_emission_out_of_bounds_does_not_get_into_a_frame(wrong: Emission) -> None:
    with pytest.raises(FrameError):
        encode_frame([wrong])


def test_a_frame_over_the_bound_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_frames, "MAX_FRAME_BYTES", 100)
    with pytest.raises(FrameError, match="bound of 100"):
        encode_frame([emission(token_ids=tuple(range(100)))])


def test_a_long_error_is_cut_at_a_character() -> None:
    frame = encode_frame([emission(finish_reason=FinishReason.FAILED, error="é" * 5000 + "\ud800")])
    (decoded,) = decode_body(frame[4:])
    assert decoded.error == "é" * 2048


def test_an_empty_error_is_not_the_same_as_none() -> None:
    frame = encode_frame([emission(error=""), emission(error=None)])
    assert [decoded.error for decoded in decode_body(frame[4:])] == ["", None]


@pytest.mark.parametrize("length", [0, 7, (16 << 20) + 1, (1 << 32) - 1])
def test_a_length_that_no_frame_has_is_refused_before_anything_is_read(length: int) -> None:
    with pytest.raises(FrameError, match=str(length)):
        decode_length(length.to_bytes(4, "little"))


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [(0, 0, "not a token frame"), (2, 9, "version 9"), (3, 1, "not a token frame"), (7, 255, "ends within")],
)
def test_a_wrong_header_is_refused(position: int, value: int, message: str) -> None:
    body = bytearray(bytes.fromhex(EXAMPLE)[4:])
    body[position] = value
    with pytest.raises(FrameError, match=message):
        decode_body(bytes(body))


def test_a_count_beyond_the_bytes_is_refused_before_memory_is_taken() -> None:
    body = bytearray(encode_frame([emission(token_ids=(1,))])[4:])
    body[24:28] = (0xFFFFFFFF).to_bytes(4, "little")
    with pytest.raises(FrameError, match="ends within an emission"):
        decode_body(bytes(body))


def test_a_frame_carries_no_token_below_zero() -> None:
    body = bytearray(encode_frame([emission(token_ids=(1,))])[4:])
    body[-4:] = b"\xff" * 4
    with pytest.raises(FrameError, match="negative"):
        decode_body(bytes(body))


def test_the_emissions_of_several_steps_become_one_for_each_request() -> None:
    steps = [
        emission("r1", token_ids=(1,), num_cached_tokens=8, num_accepted=1),
        emission("r2", token_ids=(2,)),
        emission(
            "r1",
            token_ids=(3, 4),
            num_cached_tokens=8,
            num_accepted=3,
            num_rejected=5,
            finish_reason=FinishReason.STOP,
        ),
    ]
    assert coalesce(steps) == [
        replace(steps[-1], request_id=R1, token_ids=(1, 3, 4)),
        Emission(request_id=R2, token_ids=(2,)),
    ]


def test_what_became_of_a_prediction_travels_with_each_emission() -> None:
    sent = emission(token_ids=(7,), num_accepted=3, num_rejected=(1 << 32) - 1)
    assert decode_body(encode_frame([sent])[4:]) == (sent,)


def test_the_payload_is_what_the_frame_grows_by() -> None:
    """What a slow reader may leave unread is bounded by it, and most of it may be log-probabilities."""
    scores = (TokenLogprobs(-0.5, ((7, -0.5), (8, -1.0), (9, -2.0)), 1), TokenLogprobs(-3.0, (), 4))
    one = emission(token_ids=(1, 2, 3), error="no", logprobs=scores, prompt_logprobs=scores[:1], pooled=bytes(8))
    assert len(encode_frame([one, one])) - len(encode_frame([one])) == payload_bytes(one)


def test_a_vector_travels_and_none_is_none() -> None:
    sent = [emission(finish_reason=FinishReason.STOP, pooled=bytes(range(8)), error="x"), emission(token_ids=(1,))]
    assert decode_body(encode_frame(sent)[4:]) == tuple(sent)
    assert coalesce(sent[:1] * 2)[0].pooled == sent[0].pooled


def test_log_probabilities_travel_with_their_tokens() -> None:
    sent = emission(
        token_ids=(7, 8),
        logprobs=(TokenLogprobs(-0.5, ((7, -0.5), (3, -1.25))), TokenLogprobs(-2.0)),
        prompt_logprobs=(TokenLogprobs(-float("inf"), ((1, 0.0),)),),
    )
    assert decode_body(encode_frame([sent, emission()])[4:]) == (sent, emission())
    assert coalesce([sent, sent])[0].logprobs == sent.logprobs * 2


@pytest.mark.parametrize(("num_top", "place"), [(2, "an entry"), (0, "the head of an entry")])
def test_log_probabilities_that_end_too_early_are_refused(num_top: int, place: str) -> None:
    frame = bytearray(encode_frame([emission(logprobs=(TokenLogprobs(-0.5, ((7, -0.5),)),))])[4:])
    # One likeliest token more or less than there are bytes for.
    frame[-18] = num_top
    with pytest.raises(FrameError, match=f"end within {place}"):
        decode_body(bytes(frame))
