from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from adapters.identity import AdapterDigest, AdapterRef
from deployments.gateway import answer_log
from deployments.gateway.answer_log import STOPPING, AnswerLog
from deployments.generation import ChatPrompt, GenerationRequest, HealthReport, TextPrompt
from deployments.pooled import EmbeddingRequest, RerankRequest
from deployments.timeline import Timeline
from engine.errors import OverloadError
from engine.request import SamplingParams

REQUEST = GenerationRequest(
    request_id="r", model="chat", prompt=TextPrompt(text="Hi"), params=SamplingParams(max_tokens=1, seed=0)
)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (OverloadError("full", retry_after_s=1.0), "OverloadError"),
        (KeyError("a mistake of ours"), "KeyError"),
        (GeneratorExit(), "cancelled"),
    ],
)
def test_an_answer_ends_as_what_ended_it_and_is_cancelled_only_by_who_left(error: BaseException, outcome: str) -> None:
    ended: list[Timeline] = []
    with pytest.raises(type(error)), AnswerLog(ended.append).answer(REQUEST, "chat"):
        raise error
    assert [timeline.outcome for timeline in ended] == [outcome]


@pytest.mark.parametrize(
    ("request_", "operation"),
    [
        (REQUEST, "text_completion"),
        (replace(REQUEST, prompt=ChatPrompt(messages=())), "chat"),
        (EmbeddingRequest(request_id="r", model="m", inputs=()), "embeddings"),
        (RerankRequest(request_id="r", model="m", pairs=()), "rerank"),
    ],
)
def test_an_answer_is_called_what_was_asked_for(
    request_: GenerationRequest | EmbeddingRequest | RerankRequest, operation: str
) -> None:
    """Every span was a chat's."""
    with AnswerLog(lambda _: None).answer(request_, "m") as recorder:
        assert recorder.timeline.operation == operation


async def test_an_adapter_is_unused_when_what_used_it_has_ended_whoever_uses_it_since() -> None:
    ref, other = (AdapterRef(name=name, path="/", digest=AdapterDigest(name)) for name in "ab")
    log = AnswerLog(lambda _: None)
    with log.answer(REQUEST, "chat"), log.answer(REQUEST, "chat", other):
        await log.until_unused(ref.digest)
        first = log.answer(REQUEST, "chat", ref)
        first.__enter__()
        wait = asyncio.create_task(log.until_unused(ref.digest))
        await asyncio.sleep(0)
        with log.answer(REQUEST, "chat", ref):
            for _ in range(10):
                await asyncio.sleep(0)
            assert not wait.done()
            assert log.adapters_in_use() == {ref.digest, other.digest}
            first.__exit__(None, None, None)
            await wait
        await log.until_unused(ref.digest)


async def test_what_is_under_way_is_waited_for_and_nothing_more_is_taken() -> None:
    log = AnswerLog(lambda _: None)
    healthy = HealthReport(state_by_model={"m": "ready"})
    assert log.told(healthy).is_ready
    with log.answer(REQUEST, "chat"):
        run = asyncio.create_task(log.drain(60.0, None))
        await asyncio.sleep(0.1)
        assert not run.done()
        assert log.told(healthy).state_by_part == {"gateway": STOPPING}
        with pytest.raises(OverloadError, match="stopping") as refused, log.answer(REQUEST, "chat"):
            pass
        assert refused.value.retry_after_s >= 1
    await run


async def test_what_is_left_at_the_limit_ends_with_an_error_and_what_comes_late_too() -> None:
    log = AnswerLog(lambda _: None)
    streams: list[asyncio.Future[None]] = []

    def fail_all(error: Exception) -> None:
        for stream in streams:
            if not stream.done():
                stream.set_exception(error)

    async def answer() -> None:
        with log.answer(REQUEST, "chat"):
            # It has not come as far as its stream when the first errors are told.
            await asyncio.sleep(len(streams) * 0.2)
            streams.append(asyncio.get_running_loop().create_future())
            await streams[-1]

    answers = [asyncio.create_task(answer())]
    await asyncio.sleep(0.01)
    answers.append(asyncio.create_task(answer()))
    await asyncio.sleep(0.01)
    await log.drain(0.0, fail_all)
    for error in await asyncio.gather(*answers, return_exceptions=True):
        assert isinstance(error, OverloadError)


async def test_who_does_not_end_at_all_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_log, "LAST_WORDS_S", 0.0)
    log = AnswerLog(lambda _: None)
    with log.answer(REQUEST, "chat"):
        await log.drain(0.0, lambda error: None)
