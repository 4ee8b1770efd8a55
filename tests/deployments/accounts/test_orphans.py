from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace

import pytest
from ray.exceptions import ActorDiedError

from adapters.identity import AdapterDigest, AdapterRef
from deployments.accounts import orphans
from deployments.accounts.orphans import OrphanRecorder, orphan_record
from deployments.accounts.values import UsageRecord
from deployments.errors import UnavailableError
from deployments.generation_calls import GenerationCall, TokenAddress, UsageTag, pack_ids
from engine.request import RequestId, SamplingParams

GATEWAY = TokenAddress(gateway_id="g", host="127.0.0.1", port=1)
OTHER = TokenAddress(gateway_id="o", host="127.0.0.1", port=1)
CALL = GenerationCall(
    request_id=RequestId("attempt-1"),
    prompt_ids=pack_ids([1, 2, 3]),
    params=SamplingParams(max_tokens=9),
    prior_output_ids=pack_ids([4, 5]),
    usage=UsageTag("r1.a", "blue", "sql", 12.5),
)


def test_a_record_counts_what_came_with_the_call_and_what_it_brought() -> None:
    record = orphan_record(CALL, 7)
    assert record is not None
    assert (record.record_id, record.tenant, record.model, record.started_unix_s) == ("r1.a", "blue", "sql", 12.5)
    assert (record.input_tokens, record.output_tokens, record.outcome) == (3, 9, "gateway_lost")
    assert record.adapter == ""
    assert orphan_record(replace(CALL, usage=None), 7) is None
    adapted = replace(
        CALL, adapter=AdapterRef(name="sql", digest=AdapterDigest("d"), path="/"), prior_output_ids=pack_ids(range(12))
    )
    record = orphan_record(adapted, 7)
    assert record is not None
    assert (record.adapter, record.output_tokens) == ("d", 19)


async def test_it_is_sent_until_it_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "PAUSE_S", 0.0)
    arrived: list[UsageRecord] = []
    failures = iter([ActorDiedError(), UnavailableError("The disk is full.", retry_after_s=5.0), None])

    async def send(records: Sequence[UsageRecord]) -> None:
        failure = next(failures)
        if failure is not None:
            raise failure
        arrived.extend(records)

    recorder = OrphanRecorder(send)
    recorder.gateway_lost(GATEWAY, [(CALL, 7), (replace(CALL, usage=None), 7)])
    while not arrived:
        await asyncio.sleep(0)
    assert [record.output_tokens for record in arrived] == [9]


async def test_what_had_finished_is_told_too_and_once_for_each_gateway() -> None:
    arrived: list[UsageRecord] = []

    async def send(records: Sequence[UsageRecord]) -> None:
        arrived.extend(records)

    recorder = OrphanRecorder(send)
    # A beam search makes many calls for an answer; the last has most of its tokens.
    for address, tokens in ((GATEWAY, 0), (GATEWAY, 1), (OTHER, 2), (None, 3)):
        recorder.finished(replace(CALL, reply_to=address), tokens)
    recorder.finished(replace(CALL, reply_to=GATEWAY, usage=None), 4)
    recorder.gateway_lost(GATEWAY, [])
    recorder.gateway_lost(GATEWAY, [])
    while not arrived:
        await asyncio.sleep(0)
    recorder.gateway_lost(OTHER, [(replace(CALL, reply_to=OTHER), 5)])
    while len(arrived) < 2:
        await asyncio.sleep(0)
    assert [record.output_tokens for record in arrived] == [3, 7]
    # Without a gateway nobody would ever ask for them.
    assert recorder._finished == {}


async def test_of_what_had_finished_the_newest_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orphans, "MAX_REMEMBERED", 2)
    arrived: list[UsageRecord] = []

    async def send(records: Sequence[UsageRecord]) -> None:
        arrived.extend(records)

    recorder = OrphanRecorder(send)
    for record_id in ("a", "b", "a", "c"):
        recorder.finished(replace(CALL, reply_to=GATEWAY, usage=UsageTag(record_id, "blue", "sql", 12.5)), 7)
    recorder.gateway_lost(GATEWAY, [])
    while not arrived:
        await asyncio.sleep(0)
    assert [record.record_id for record in arrived] == ["a", "c"]


async def test_it_is_sent_in_no_requests_context() -> None:
    request: ContextVar[str] = ContextVar("request", default="none")
    seen: list[str] = []

    async def send(_: Sequence[UsageRecord]) -> None:
        seen.append(request.get())

    request.set("one that Serve is about to cancel, and with it what it has asked for")
    OrphanRecorder(send).gateway_lost(GATEWAY, [(CALL, 7)])
    await asyncio.sleep(0)
    assert seen == ["none"]
