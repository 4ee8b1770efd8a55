from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deployments.accounts.orphans import orphan_record
from deployments.answer_events import Finished, GenerationEvent, TextDelta
from deployments.gateway.beam_search import BeamSearch
from deployments.gateway.gateway import Gateway
from deployments.generation import BeamShare, GenerationRequest
from engine.build import build_engine
from engine.errors import EngineError, OverloadError
from engine.request import Request, RequestId, SamplingParams
from tests.deployments.conftest import OpenGateway, Serving
from tests.deployments.in_process import ask, events_of

WIDTH, NUM_TOKENS = 3, 10


def requests_of(**params: object) -> list[GenerationRequest]:
    return [
        ask(
            request_id=f"r-{place}",
            max_tokens=NUM_TOKENS,
            params={"num_logprobs": 1} | params,
            beams=BeamShare(group="r-0", width=WIDTH, place=place),
        )
        for place in range(WIDTH)
    ]


async def answers_of(opened: Gateway, requests: Sequence[GenerationRequest]) -> list[list[GenerationEvent]]:
    return await asyncio.gather(*(events_of(opened, request) for request in requests))


def tokens_of(events: Sequence[GenerationEvent]) -> list[int]:
    return [score.token_id for event in events if isinstance(event, TextDelta) for score in event.scores]


def expected(serving: Serving, prompt_ids: Sequence[int]) -> list[list[int]]:
    """The same search, by an engine without a gateway."""
    engine = build_engine(serving.model.engine)
    search = BeamSearch(WIDTH, max_tokens=NUM_TOKENS, length_penalty=1.0, ends=frozenset())
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, num_logprobs=search.num_expansions)
    while search.open:
        for index, beam in enumerate(search.open):
            prompt = (*prompt_ids, *beam.token_ids)
            engine.add(Request(request_id=RequestId(str(index)), prompt_ids=prompt, params=params))
        told = {}
        while len(told) < len(search.open):
            told |= {emission.request_id: emission.logprobs[0] for emission in engine.step()}
        search.advance([told[RequestId(str(index))] for index in range(len(search.open))])
    return [list(beam.token_ids) for beam in search.found]


async def test_the_answers_of_a_request_share_one_search(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    requests = requests_of()
    answers = await answers_of(opened, requests)
    prompt_ids = (await opened.tokenize("chat", requests[0].prompt, with_texts=False)).token_ids  # type: ignore[arg-type]
    assert list(map(tokens_of, answers)) == expected(serving, prompt_ids)
    assert len(serving.replicas.calls) == 1 + WIDTH * (NUM_TOKENS - 1)
    answer_ids = [request.request_id for request in requests]
    # What is recorded of each answer if the gateway dies now: its prompt, and its tokens so far.
    records = [orphan_record(call, 1) for call in serving.replicas.calls]
    told = {record.record_id: (record.input_tokens, record.output_tokens) for record in records if record is not None}
    assert told == dict.fromkeys(answer_ids, (len(prompt_ids), NUM_TOKENS))
    noted = [opened._log.find(request_id)[0].called_s_by_attempt for request_id in answer_ids]
    expansions = {call.request_id for call in serving.replicas.calls}
    # Each is one answer's: the prompt that of whichever began first, and until another has come its expansions too.
    assert all(expansions.intersection(attempts) for attempts in noted)
    assert sorted(expansions) == sorted(request_id for attempts in noted for request_id in expansions & set(attempts))
    for events in answers:
        end = events[-1]
        assert isinstance(end, Finished)
        assert end.num_completion_tokens == NUM_TOKENS
        assert all(len(s.top) == 1 for event in events if isinstance(event, TextDelta) for s in event.scores)


async def test_more_tokens_may_be_scored_than_a_search_needs(gateway: OpenGateway) -> None:
    for events in await answers_of(await gateway(), requests_of(num_logprobs=8)):
        scores = [score for event in events if isinstance(event, TextDelta) for score in event.scores]
        assert [len(score.top) for score in scores] == [8] * NUM_TOKENS


async def test_an_end_of_sequence_ends_a_sequence_and_is_not_shown(gateway: OpenGateway, serving: Serving) -> None:
    first = tokens_of((await answers_of(await gateway(), requests_of()))[0])
    model = replace(serving.model, eos_ids=(first[2],))
    opened = await serving.gateway(model=model)
    answers = await answers_of(opened, requests_of(ignore_eos=False))
    ended = [events for events in answers if isinstance(end := events[-1], Finished) and end.reason == "stop"]
    assert ended
    for events in answers:
        assert first[2] not in tokens_of(events)
    for events in ended:
        end = events[-1]
        assert isinstance(end, Finished)
        assert len(tokens_of(events)) == end.num_completion_tokens - 1


async def test_a_search_whose_replica_dies_goes_on_where_it_was(gateway: OpenGateway, serving: Serving) -> None:
    """It began anew, and after a few lost replicas not again."""
    opened = await gateway()
    whole = list(map(tokens_of, await answers_of(opened, requests_of())))
    num_calls = len(serving.replicas.calls)
    serving.replicas.calls.clear()
    serving.replicas.engine.hold_after_steps = serving.replicas.engine.snapshot().num_steps + 3
    asked = asyncio.create_task(answers_of(opened, requests_of()))
    while not any(call.prior_output_ids for call in serving.replicas.calls):
        await asyncio.sleep(0.01)
    await serving.replicas.kill()
    assert list(map(tokens_of, await asked)) == whole
    # Those that were lost are repeated, and no others.
    assert len(serving.replicas.calls) <= num_calls + WIDTH


async def test_replicas_that_an_expansion_takes_along_are_few(
    gateway: OpenGateway, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search is not repeated by whoever waits for it."""

    def die(request: Request) -> None:
        raise EngineError("The engine has ended.")

    opened = await gateway(max_resumes=1)
    monkeypatch.setattr(serving.replicas.engine, "add", die)
    found = await asyncio.gather(*(events_of(opened, request) for request in requests_of()), return_exceptions=True)
    assert [type(one) for one in found] == [EngineError] * WIDTH
    # An answer that joins after the failure searches again.
    assert len(serving.replicas.calls) <= 2 * WIDTH


async def test_clients_that_leave_end_the_search(gateway: OpenGateway, serving: Serving) -> None:
    """And pay for what it had found until then, which the records had as no tokens."""
    opened = await gateway()
    serving.replicas.engine.hold_after_steps = 3
    asked = asyncio.create_task(answers_of(opened, requests_of()))
    while not any(call.prior_output_ids for call in serving.replicas.calls):
        await asyncio.sleep(0.01)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    await serving.replicas.until_idle()
    num_calls = len(serving.replicas.calls)
    assert num_calls < WIDTH * NUM_TOKENS
    left = [opened._log.find(request.request_id)[0] for request in requests_of()]
    while any(timeline.outcome != "cancelled" for timeline in left):
        await asyncio.sleep(0.01)
    assert all(0 < timeline.num_tokens < NUM_TOKENS for timeline in left)
    # Whoever asks the same again begins anew. Where nothing was in the engine as they left, it is held still.
    serving.replicas.engine.release()
    assert all(map(tokens_of, await answers_of(opened, requests_of())))
    assert len(serving.replicas.calls) == num_calls + 1 + WIDTH * (NUM_TOKENS - 1)


async def test_a_refused_expansion_refuses_every_answer(gateway: OpenGateway, serving: Serving) -> None:
    opened = await gateway()
    crowd = [
        replace(request, request_id=f"{n}-{request.request_id}", beams=replace(request.beams, group=f"{n}"))
        for n in range(30)
        for request in requests_of()
        if request.beams is not None
    ]
    found = await asyncio.gather(*(events_of(opened, request) for request in crowd), return_exceptions=True)
    assert any(isinstance(one, OverloadError) for one in found)
    assert all(isinstance(one, list | OverloadError) for one in found)
    await serving.replicas.until_idle()
