from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from adapters.identity import AdapterDigest, AdapterRef
from deployments.channel.token_frames import payload_bytes
from deployments.config import ChannelConfig
from deployments.gateway.token_checks import (
    MAX_PROMPT_SCORES,
    adapter_start,
    answer_room,
    check_prompt_scores,
    check_some_are_left,
    check_token_ids,
)
from deployments.generation import GenerationRequest, TextPrompt
from engine.errors import RequestError
from engine.request import Emission, RequestId, SamplingParams, TokenLogprobs

EOS = (2,)
LIMIT = 64


def asking(num_prompt_logprobs: int | None = None, **asked: Any) -> GenerationRequest:
    params = SamplingParams(max_tokens=1, num_prompt_logprobs=num_prompt_logprobs)
    return GenerationRequest(request_id="r", model="m", prompt=TextPrompt(text="x"), params=params, **asked)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, bad_words=((5,),)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2,)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2,), min_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 4), min_tokens=3),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5, 6), bad_words=((4,), (5, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4, 4), (5, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5, 5),)),
        SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5, 5, 5),), min_tokens=2),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((2, 4), (2, 5), (9, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4,), (4, 5))),
        SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4, 4), (4, 4, 5))),
        SamplingParams(max_tokens=2, allowed_token_ids=(5,), bad_words=((5, 5, 5),)),
    ],
)
def test_some_token_is_left(params: SamplingParams) -> None:
    check_some_are_left(params, EOS)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (SamplingParams(max_tokens=9, allowed_token_ids=(2,), min_tokens=1), "'min_tokens' leaves"),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(2, 7), stop_token_ids=(7,), min_tokens=1),
            "'min_tokens' leaves",
        ),
        (SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4,), (5,))), "'bad_words' leaves"),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5,),), min_tokens=1),
            "'bad_words' and 'min_tokens' leave",
        ),
        (SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4,), (5, 5))), r"leaves after .* \[5\];"),
        (SamplingParams(max_tokens=3, allowed_token_ids=(5,), bad_words=((5, 5, 5),)), r"leaves after .* \[5, 5\];"),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(4, 5), bad_words=((4, 5, 5), (5, 4))),
            r"'bad_words' leaves after the tokens \[4, 5\];",
        ),
        (
            SamplingParams(max_tokens=9, allowed_token_ids=(2, 5), bad_words=((5, 5, 5),), min_tokens=3),
            r"'bad_words' and 'min_tokens' leave after the tokens \[5, 5\];",
        ),
    ],
)
def test_what_forbids_all_that_it_allows_is_refused(params: SamplingParams, words: str) -> None:
    """Where the engine would find no finite number, and call it a failure of its own."""
    with pytest.raises(RequestError, match=words) as refused:
        check_some_are_left(params, EOS)
    assert refused.value.field == "allowed_token_ids"


@pytest.mark.parametrize(
    ("params", "field"),
    [
        (SamplingParams(max_tokens=9, logit_bias=((9, 1.0),)), "logit_bias"),
        (SamplingParams(max_tokens=9, allowed_token_ids=(1, 9)), "allowed_token_ids"),
        (SamplingParams(max_tokens=9, stop_token_ids=(9,)), "stop_token_ids"),
    ],
)
def test_tokens_that_the_model_has_not_are_refused(params: SamplingParams, field: str) -> None:
    check_token_ids(params, vocab_size=10)
    with pytest.raises(RequestError) as refused:
        check_token_ids(params, vocab_size=9)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("num_prompt", "asked", "expected"),
    [
        (60, {}, 4),
        (60, {"max_tokens": 4}, 4),
        (60, {"max_tokens": 100, "clips_max_tokens": True}, 4),
        (60, {"max_tokens": 2, "clips_max_tokens": True}, 2),
        (63, {"max_tokens": 100, "clips_max_tokens": True}, 1),
    ],
)
def test_an_answer_has_what_is_asked_for_or_what_is_left(num_prompt: int, asked: dict[str, Any], expected: int) -> None:
    assert answer_room(asking(**asked), num_prompt, LIMIT, field="messages") == expected


@pytest.mark.parametrize(
    ("num_prompt", "asked", "field", "said"),
    [
        (64, {}, "messages", r"maximum context length is 64 tokens\. However, you requested 65"),
        (60, {"max_tokens": 5}, "messages", r"65 tokens \(60 in 'messages', 5 in the completion\)"),
        # It said that one token was requested.
        (64, {"max_tokens": 0}, "messages", "'messages' has 64, which leaves no room for the one token that is"),
        (60, {"max_tokens": 64}, "max_tokens", "'max_tokens' is 64, but this model's maximum context length is 64"),
        # Claude Code looks for these words, and makes the conversation shorter.
        (64, {"max_tokens": 9, "clips_max_tokens": True}, "messages", "prompt is too long: 64 tokens > 63 maximum"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_and_bound(
    num_prompt: int, asked: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        answer_room(asking(**asked), num_prompt, LIMIT, field="messages")
    assert (refused.value.field, refused.value.code) == (field, "context_length_exceeded")


@pytest.mark.parametrize(
    ("num_prompt", "asked", "room"),
    [(60, {}, 4), (60, {"max_tokens": 16, "clips_max_tokens": True}, 4), (30, {"max_tokens": 16}, 16)],
)
def test_more_tokens_than_the_answer_can_have_are_refused(num_prompt: int, asked: dict[str, Any], room: int) -> None:
    """They were accepted where the prompt leaves no room for them, and the answer ended with fewer."""
    request = asking(**asked)

    def found(min_tokens: int) -> int:
        params = replace(request.params, min_tokens=min_tokens)
        return answer_room(replace(request, params=params), num_prompt, LIMIT, field="prompt")

    assert found(room) == room
    said = rf"\({room + 1}\) must be at most {room}, .* 'prompt' has {num_prompt}"
    with pytest.raises(RequestError, match=said) as caught:
        found(room + 1)
    assert caught.value.field == "min_tokens"


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_as_many_as_can_be_told_fit_into_what_a_stream_may_leave_unread(num_top: int) -> None:
    entry = TokenLogprobs(-1.0, ((1, -1.0),) * num_top)
    entries = (entry,) * (MAX_PROMPT_SCORES // (num_top + 1))
    emission = Emission(request_id=RequestId("r" * 64), token_ids=(1,), prompt_logprobs=entries)
    assert payload_bytes(emission) < ChannelConfig(secret=b"").max_buffered_bytes


def test_more_than_can_be_told_are_refused_by_the_field_that_asks() -> None:
    check_prompt_scores(asking(None), 10**9)
    check_prompt_scores(asking(0), MAX_PROMPT_SCORES)
    for echoes, field in ((False, "prompt_logprobs"), (True, "logprobs")):
        with pytest.raises(RequestError, match=str(MAX_PROMPT_SCORES)) as caught:
            check_prompt_scores(asking(20, echoes=echoes), MAX_PROMPT_SCORES // 21 + 1)
        assert caught.value.field == field


def test_a_prompt_activates_its_adapter_or_the_error_tells_by_what() -> None:
    def spelling(token_id: int) -> bytes:
        return b"<%d>" % token_id

    plain = AdapterRef(name="plain", path="/x", digest=AdapterDigest("d"))
    activated = replace(plain, name="checker", invocation_ids=(7, 8))
    assert adapter_start(None, (1, 2), spelling, field="prompt") == 0
    assert adapter_start(plain, (1, 2), spelling, field="prompt") == 0
    assert adapter_start(activated, (7, 8, 1, 7, 8, 2), spelling, field="prompt") == 3
    with pytest.raises(RequestError, match=r"^'messages' does not contain '<7><8>' \(token ids \[7, 8\]\)") as caught:
        adapter_start(activated, (7, 1, 8), spelling, field="messages")
    assert "'checker'" in caught.value.message
    assert (caught.value.field, caught.value.code) == ("messages", "adapter_not_activated")
