from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.answer_events import Finished, GenerationEvent, Started, TextDelta
from deployments.gateway.answer_shape import AnswerParts
from deployments.gateway.answer_writer import AnswerWriter
from deployments.generation import GenerationRequest, TextPrompt
from deployments.stream.reasoning import THINK, ReasoningSplit
from deployments.stream.stream_handler import HeldToken
from engine.request import SamplingParams
from tests.deployments.conftest import OpenGateway
from tests.deployments.in_process import ask, events_of, text_of

UNASKED: Any = None


def ids_of(events: Sequence[GenerationEvent]) -> list[int]:
    return [token_id for event in events if isinstance(event, TextDelta) for token_id in event.token_ids]


@pytest.mark.parametrize("returns_token_ids", [True, False])
def test_tokens_of_held_text_wait_for_it(returns_token_ids: bool) -> None:
    asked: list[int] = []

    def take_tokens(num_behind: int) -> tuple[HeldToken, ...]:
        asked.append(num_behind)
        return (HeldToken(0, 0, num_behind, None),)

    request = GenerationRequest(
        request_id="r",
        model="m",
        prompt=UNASKED,
        params=SamplingParams(max_tokens=1),
        returns_token_ids=returns_token_ids,
    )
    writer = AnswerWriter(request, UNASKED, None, UNASKED, ())
    handler: Any = SimpleNamespace(take_tokens=take_tokens, num_tokens=1)
    parts = AnswerParts(ReasoningSplit(THINK, has_begun=True))
    deltas = [*writer.deltas(parts, "a</thi", handler), *writer.deltas(parts, "nk>b", handler)]
    assert [(delta.reasoning, delta.text) for delta in deltas] == [("a", ""), ("", "b")]
    assert asked == [len("</thi"), 0]
    assert [delta.token_ids for delta in deltas] == ([(5,), (0,)] if returns_token_ids else [(), ()])


async def test_the_token_ids_are_those_of_the_text_and_of_its_end(gateway: OpenGateway) -> None:
    opened = await gateway()
    prompt = TextPrompt(text="the dog")
    events = await events_of(opened, ask(prompt, returns_token_ids=True))
    started, finished = events[0], events[-1]
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert started.prompt_ids == (await opened.tokenize("chat", prompt, with_texts=False)).token_ids
    told = ids_of(events)
    assert len(told) == finished.num_completion_tokens
    pieces = opened._served["chat"].codec.pieces
    assert pieces.decode(told) == text_of(events)
    assert ids_of(await events_of(opened, ask(prompt))) == []


async def test_the_id_of_the_token_that_ends_an_answer_is_told_and_its_text_is_not(gateway: OpenGateway) -> None:
    opened = await gateway()
    ids = ids_of(await events_of(opened, ask(max_tokens=40, returns_token_ids=True)))
    cut = ids.index(ids[10])
    params = {"stop_token_ids": (ids[10],)}
    events = await events_of(opened, ask(max_tokens=40, params=params, returns_token_ids=True))
    assert ids_of(events) == ids[: cut + 1]
    assert text_of(events) == opened._served["chat"].codec.pieces.decode(ids[:cut])


async def test_special_tokens_are_text_where_they_are_asked_for(gateway: OpenGateway) -> None:
    opened = await gateway()
    mark, special_id = next(iter(opened._served["chat"].dialect.special_ids.items()))
    params: dict[str, Any] = {"logit_bias": ((special_id, 100.0),), "num_logprobs": 0}
    for shows_special in (False, True):
        asked = ask(TextPrompt(text="a"), max_tokens=2, params=params, shows_special=shows_special)
        events = await events_of(opened, asked)
        assert text_of(events) == mark * 2 * shows_special
        scores = [score for event in events if isinstance(event, TextDelta) for score in event.scores]
        assert b"".join(score.raw for score in scores).decode() == text_of(events)
