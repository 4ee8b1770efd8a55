"""Stored responses on a running server, by OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.e2e.server import Server, key_of

pytestmark = pytest.mark.e2e

ASKED: dict[str, Any] = {"model": "stdlib-chat", "temperature": 0, "max_output_tokens": 40}


@pytest.fixture
def white(guarded: Server) -> Iterator[OpenAI]:
    with guarded.client(api_key=key_of("white")) as client:
        yield client


def test_a_conversation_continues_as_if_it_had_been_sent_whole(white: OpenAI) -> None:
    first = white.responses.create(input="What does os.getcwd do?", **ASKED)
    assert first.output_text
    with white.responses.stream(input="And os.chdir?", previous_response_id=first.id, **ASKED) as stream:
        second = stream.get_final_response()
    assert second.previous_response_id == first.id
    whole = white.responses.create(
        input=[
            {"role": "user", "content": "What does os.getcwd do?"},
            {"role": "assistant", "content": first.output_text},
            {"role": "user", "content": "And os.chdir?"},
        ],
        store=False,
        **ASKED,
    )
    assert second.output_text == whole.output_text
    assert second.usage is not None
    assert whole.usage is not None
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert white.responses.retrieve(second.id).output_text == second.output_text
    items = list(white.responses.input_items.list(second.id, order="asc", limit=1))
    assert [item.type for item in items] == ["message"] * 3


def test_who_deletes_a_response_is_alone_with_it(guarded: Server, white: OpenAI) -> None:
    stored = white.responses.create(input="What does os.getcwd do?", **ASKED)
    with guarded.client(api_key=key_of("red")) as red:
        with pytest.raises(openai.NotFoundError):
            red.responses.retrieve(stored.id)
        with pytest.raises(openai.BadRequestError):
            red.responses.create(input="On", previous_response_id=stored.id, **ASKED)
    white.responses.delete(stored.id)
    with pytest.raises(openai.NotFoundError):
        white.responses.retrieve(stored.id)
