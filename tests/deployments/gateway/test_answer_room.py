from __future__ import annotations

from typing import Any

import pytest

from deployments.gateway.answer_room import answer_room
from deployments.generation import GenerationRequest, TextPrompt
from engine.errors import RequestError
from engine.request import SamplingParams

LIMIT = 64


def room(num_prompt: int, **asked: Any) -> int:
    request = GenerationRequest(
        request_id="r", model="m", prompt=TextPrompt(text=""), params=SamplingParams(max_tokens=1), **asked
    )
    return answer_room(request, num_prompt, LIMIT, field="messages")


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
    assert room(num_prompt, **asked) == expected


@pytest.mark.parametrize(
    ("num_prompt", "asked", "field", "said"),
    [
        (64, {}, "messages", r"maximum context length is 64 tokens\. However, you requested 65"),
        (60, {"max_tokens": 5}, "messages", r"65 tokens \(60 in 'messages', 5 in the completion\)"),
        (60, {"max_tokens": 64}, "max_tokens", "'max_tokens' is 64, but this model's maximum context length is 64"),
        # Claude Code looks for these words, and makes the conversation shorter.
        (64, {"max_tokens": 9, "clips_max_tokens": True}, "messages", "prompt is too long: 64 tokens > 63 maximum"),
    ],
)
def test_what_does_not_fit_is_refused_by_field_and_bound(
    num_prompt: int, asked: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(RequestError, match=said) as refused:
        room(num_prompt, **asked)
    assert (refused.value.field, refused.value.code) == (field, "context_length_exceeded")
