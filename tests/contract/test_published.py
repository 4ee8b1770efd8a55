"""The check itself: it finds what is wrong, and its exceptions are still exceptions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contract.published import EXCEPTIONS, SCHEMAS, check, place_in

USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
MESSAGE = {"role": "assistant", "content": "Hi", "refusal": None}
CHOICE = {"index": 0, "message": MESSAGE, "logprobs": None, "finish_reason": "stop"}
CHAT = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [CHOICE], "usage": USAGE}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ""),
        ({"created": "now"}, r"\$.created: 'now' is not of type 'integer'"),
        ({"colour": "red"}, "'colour' was unexpected"),
        ({"usage": USAGE | {"tokens": 1}}, r"\$.usage: .*'tokens' was unexpected"),
        ({"choices": [CHOICE | {"message": {"role": "assistant"}}]}, "'content' is a required property"),
        ({"choices": [CHOICE | {"finish_reason": "abort"}]}, "'abort' is not one of"),
    ],
)
def test_what_is_wrong_is_found_and_named(change: dict[str, Any], words: str) -> None:
    if not words:
        check("CreateChatCompletionResponse", CHAT)
        return
    with pytest.raises(AssertionError, match=words):
        check("CreateChatCompletionResponse", CHAT | change)


def test_every_exception_is_needed_and_has_a_reason() -> None:
    published = json.loads(SCHEMAS.read_text(encoding="utf-8"))
    for places, change, reason in EXCEPTIONS:
        assert len(reason.split()) >= 3
        for place in places:
            assert not change.items() <= place_in(published, place).items(), place
