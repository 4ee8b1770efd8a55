from __future__ import annotations

import pytest

from deployments.channel.token_frames import payload_bytes
from deployments.config import ChannelConfig
from deployments.gateway.token_scores import MAX_PROMPT_SCORES, check_prompt_scores, scored, scored_prompt
from deployments.generation import GenerationRequest, TextPrompt
from engine.errors import RequestError
from engine.request import Emission, RequestId, SamplingParams, TokenLogprobs


def letter(token_id: int) -> bytes:
    """Token 0 is `a`; token 26 is the first byte of a character, and no more."""
    return bytes([97 + token_id]) if token_id < 26 else b"\xc3"


def asking(num_prompt_logprobs: int | None, *, echoes: bool = False) -> GenerationRequest:
    params = SamplingParams(max_tokens=1, num_prompt_logprobs=num_prompt_logprobs)
    return GenerationRequest(request_id="r", model="m", prompt=TextPrompt(text="x"), params=params, echoes=echoes)


def test_scores_tell_tokens_as_text_with_their_ranks() -> None:
    (score,) = scored(letter, [2], [TokenLogprobs(-3.0, ((0, -0.1), (26, -2.0)), rank=7)])
    assert (score.text, score.logprob, score.rank) == ("c", -3.0, 7)
    assert [(top.text, top.rank) for top in score.top] == [("a", 1), ("\ufffd", 2)]


def test_the_first_token_of_a_prompt_follows_nothing() -> None:
    first, second = scored_prompt(letter, [0, 1], [TokenLogprobs(-1.0)])
    assert (first.text, first.logprob, second.text, second.logprob) == ("a", None, "b", -1.0)


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_as_many_as_can_be_told_fit_into_what_a_stream_may_leave_unread(num_top: int) -> None:
    entry = TokenLogprobs(-1.0, ((1, -1.0),) * num_top)
    entries = (entry,) * (MAX_PROMPT_SCORES // (num_top + 1))
    emission = Emission(request_id=RequestId("r" * 64), token_ids=(1,), prompt_logprobs=entries)
    assert payload_bytes(emission) < ChannelConfig().max_buffered_bytes


def test_more_than_can_be_told_are_refused_by_the_field_that_asks() -> None:
    check_prompt_scores(asking(None), 10**9)
    check_prompt_scores(asking(0), MAX_PROMPT_SCORES)
    for echoes, field in ((False, "prompt_logprobs"), (True, "logprobs")):
        with pytest.raises(RequestError, match=str(MAX_PROMPT_SCORES)) as caught:
            check_prompt_scores(asking(20, echoes=echoes), MAX_PROMPT_SCORES // 21 + 1)
        assert caught.value.field == field
