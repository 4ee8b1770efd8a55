"""A gateway asks its classifier about a bounded number of inputs at a time, and about running answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace

import pytest

from deployments.answer_events import Verdict
from deployments.batched_model import MAX_CALL_CHARS
from deployments.config import SafetyConfig
from deployments.errors import UnavailableError
from deployments.gateway.verdicts import Verdicts
from deployments.room import NUM_PLACES
from engine.errors import OverloadError, RequestError
from tests.deployments.in_process import Response


class HeldJudge:
    """The handle of a classifier that answers when it is told to."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bool]] = []
        self.gate = asyncio.Semaphore(0)
        self.judge = self

    def remote(self, texts: Sequence[str], is_urgent: bool) -> Response:
        self.asked += [(text, is_urgent) for text in texts]
        return Response(self._judged(texts))

    async def _judged(self, texts: Sequence[str]) -> list[Verdict]:
        await self.gate.acquire()
        return [Verdict(score_by_hazard={}, flagged=()) for _ in texts]


async def opened(judge: HeldJudge, timeout_s: float) -> Verdicts:
    verdicts = Verdicts(SafetyConfig(model_path="unused", timeout_s=timeout_s), judge)  # type: ignore[arg-type]
    await verdicts.start()
    return verdicts


async def until_asked(judge: HeldJudge, count: int) -> None:
    async with asyncio.timeout(30):
        while len(judge.asked) < count:
            await asyncio.sleep(0.001)


async def test_inputs_wait_for_a_place_and_running_answers_do_not() -> None:
    """All at once, each waited for all, until every one's time was up: of 4,000 requests in 8 s, 424 were answered."""
    judge = HeldJudge()
    verdicts = await opened(judge, timeout_s=3600.0)
    count = 2 * NUM_PLACES
    inputs = [asyncio.create_task(verdicts.of_answer("flow", [f"{i}"])) for i in range(count)]
    await until_asked(judge, NUM_PLACES)
    window = asyncio.create_task(verdicts.of_answer("flow", ["window"], is_running=True))
    await until_asked(judge, NUM_PLACES + 1)
    assert judge.asked[-1] == ("window", True)
    assert not any(is_urgent for _, is_urgent in judge.asked[:-1])
    for _ in range(count + 1):
        judge.gate.release()
    await asyncio.gather(window, *inputs)
    assert [text for text, _ in judge.asked if text != "window"] == [f"{i}" for i in range(count)]


async def test_moderations_of_one_tenant_hold_up_nobody_else_s() -> None:
    judge = HeldJudge()
    verdicts = await opened(judge, timeout_s=3600.0)
    flood = [asyncio.create_task(verdicts.of("loud", ["loud"])) for _ in range(2 * NUM_PLACES)]
    await until_asked(judge, NUM_PLACES)
    quiet = asyncio.create_task(verdicts.of("quiet", ["quiet"]))
    await until_asked(judge, NUM_PLACES + 1)
    assert judge.asked[-1] == ("quiet", False)
    for _ in range(len(flood) + 1):
        judge.gate.release()
    await asyncio.gather(quiet, *flood)


async def test_the_time_limit_is_the_classifiers_own_and_ends_a_call_that_hangs() -> None:
    verdicts = await opened(HeldJudge(), timeout_s=0.01)
    with pytest.raises(UnavailableError, match=r"no verdict within 0\.01 seconds"):
        await verdicts.of("flow", ["text"])


async def test_the_time_limit_of_a_moderation_begins_anew_at_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever had waited for a place had little time left with it: under load nobody was answered."""
    judge = HeldJudge()
    verdicts = await opened(judge, timeout_s=60.0)
    passed_s, loop = 0.0, asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
    first = [asyncio.create_task(verdicts.of("flow", ["first"])) for _ in range(NUM_PLACES)]
    last = asyncio.create_task(verdicts.of("flow", ["last"]))
    await until_asked(judge, NUM_PLACES)
    passed_s += 50.0
    judge.gate.release()
    await until_asked(judge, NUM_PLACES + 1)
    passed_s += 50.0
    found = await asyncio.gather(*first, return_exceptions=True)
    assert sum(isinstance(outcome, UnavailableError) for outcome in found) == NUM_PLACES - 1
    judge.gate.release()
    assert len(await last) == 1


async def test_a_long_text_has_more_time_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `max_chars` permits took longer than the limit: even an idle server refused it, whenever it was retried."""
    judge = HeldJudge()
    verdicts = await opened(judge, timeout_s=60.0)
    passed_s, loop = 0.0, asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + passed_s)
    texts = ("short", "long" * MAX_CALL_CHARS)
    calls = [asyncio.create_task(ask("flow", [text])) for text in texts for ask in (verdicts.of, verdicts.of_answer)]
    await until_asked(judge, len(calls))
    passed_s += 230.0
    for call in calls[:2]:
        with pytest.raises(UnavailableError, match="within 60 seconds"):
            await call
    for _ in calls:
        judge.gate.release()
    assert [len(verdicts) for verdicts in await asyncio.gather(*calls[2:])] == [1, 1]


async def test_a_moderation_waits_for_a_place_no_longer_than_for_its_verdict() -> None:
    judge = HeldJudge()
    verdicts = await opened(judge, timeout_s=0.01)
    async with AsyncExitStack() as places:
        for _ in range(NUM_PLACES):
            await places.enter_async_context(verdicts._room.place("flow"))
        with pytest.raises(UnavailableError, match=r"no verdict within 0\.01 seconds"):
            await verdicts.of("flow", ["text"])
    assert not judge.asked


@pytest.mark.parametrize("fails_closed", [True, False])
async def test_a_refusal_of_the_classifier_is_the_clients_unless_safety_fails_open(fails_closed: bool) -> None:
    async def judge(texts: Sequence[str], is_urgent: bool) -> OverloadError:
        return OverloadError("Too many.", retry_after_s=7.0)

    handle = SimpleNamespace(judge=SimpleNamespace(remote=lambda *args: Response(judge(*args))))
    verdicts = Verdicts(SafetyConfig(model_path="unused", fails_closed=fails_closed), handle)  # type: ignore[arg-type]
    await verdicts.start()
    with pytest.raises(OverloadError) as refused:
        await verdicts.of("flow", ["text"])
    assert refused.value.retry_after_s == 7.0
    for is_running in (True, False):
        asked = verdicts.of_answer("flow", ["text"], is_running=is_running)
        if fails_closed:
            with pytest.raises(OverloadError):
                await asked
        else:
            assert [verdict.error for verdict in await asked] == ["Too many."]
    assert verdicts.num_by_outcome == {"passed": 0, "flagged": 0, "missing": 2}


async def test_what_passes_and_what_does_not_is_counted() -> None:
    async def judge(texts: Sequence[str], is_urgent: bool) -> list[Verdict]:
        return [Verdict(score_by_hazard={}, flagged=("harm",) if text == "bad" else ()) for text in texts]

    handle = SimpleNamespace(judge=SimpleNamespace(remote=lambda *args: Response(judge(*args))))
    verdicts = Verdicts(SafetyConfig(model_path="unused"), handle)  # type: ignore[arg-type]
    await verdicts.start()
    await verdicts.of_answer("flow", ["good", "bad", "good"])
    assert verdicts.num_by_outcome == {"passed": 2, "flagged": 1, "missing": 0}


async def test_without_a_classifier_there_are_no_verdicts() -> None:
    verdicts = Verdicts(None, None)
    await verdicts.start()
    with pytest.raises(RequestError, match="no safety classifier"):
        await verdicts.of("flow", ["text"])
