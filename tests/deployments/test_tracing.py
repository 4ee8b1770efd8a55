"""Traces say what the timeline says, as children of what the client sent."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from deployments import tracing
from deployments.timeline import Stage, Timeline
from deployments.tracing import TraceWriter, otlp_exporter
from engine.request import RequestId
from engine.trace import RequestTrace
from tests.deployments.test_timeline import TRACE

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TIMELINE = Timeline(
    request_id="r1.a",
    model="sql",
    base="base",
    tenant="blue",
    arrived_unix_s=1000.0,
    stages=[Stage("tokenize", 0.0, 0.25)],
    called_s_by_attempt={RequestId("a1"): 0.0},
    num_prompt_tokens=9,
    num_tokens=3,
    first_token_s=0.5,
    end_s=4.0,
    outcome="stop",
    trace_parent=PARENT,
)


async def traces(base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
    return {RequestId("a1"): TRACE}


def a_writer(exporter: InMemorySpanExporter, sample_ratio: float = 1.0) -> TraceWriter:
    return TraceWriter(exporter, traces, service="test", sample_ratio=sample_ratio)


async def test_an_answer_is_a_span_and_its_stages_are_its_children() -> None:
    exporter = InMemorySpanExporter()
    writer = a_writer(exporter)
    writer.start()
    writer.add(TIMELINE)
    await writer.close()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    answer = spans.pop("chat sql")
    assert answer.parent is not None
    assert f"{answer.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{answer.parent.span_id:016x}" == PARENT.split("-")[2]
    assert (answer.start_time, answer.end_time) == (1000 * 10**9, 1004 * 10**9)
    assert answer.attributes is not None
    assert answer.attributes["gen_ai.usage.output_tokens"] == 3
    assert answer.attributes["antiphon.tenant"] == "blue"
    assert [event.timestamp for event in answer.events] == [int(1000.5e9)]
    from_engine = {"route", "queue", "prefill of 512 tokens", "prefill of 88 tokens", "decode", "preempted"}
    assert set(spans) == {"tokenize"} | from_engine
    assert {span.parent.span_id for span in spans.values() if span.parent} == {answer.context.span_id}
    assert spans["tokenize"].end_time == int(1000.25e9)


@pytest.mark.parametrize(("outcome", "status"), [("length", StatusCode.UNSET), ("EngineError", StatusCode.ERROR)])
async def test_failures_are_marked(outcome: str, status: StatusCode) -> None:
    exporter = InMemorySpanExporter()
    writer = a_writer(exporter)
    writer.add(replace(TIMELINE, operation="embeddings", outcome=outcome, trace_parent="nonsense"))
    await writer.close()
    [answer] = [span for span in exporter.get_finished_spans() if span.name == "embeddings sql"]
    assert answer.attributes is not None
    assert answer.attributes["gen_ai.operation.name"] == "embeddings"
    assert answer.parent is None
    assert answer.status.status_code is status


async def test_no_span_of_a_burst_is_lost_and_others_have_their_turn_meanwhile() -> None:
    exporter = InMemorySpanExporter()
    writer = a_writer(exporter)
    for _ in range(1000):
        writer.add(TIMELINE)
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(take_turns())
    await writer.write()
    other.cancel()
    await writer.close()
    assert num_turns >= 1000
    assert len(exporter.get_finished_spans()) == 1000 * 8


async def test_a_client_s_decision_goes_before_ours() -> None:
    exporter = InMemorySpanExporter()
    writer = a_writer(exporter, sample_ratio=0.0)
    writer.add(replace(TIMELINE, trace_parent=""))
    writer.add(TIMELINE)
    await writer.close()
    assert len([span for span in exporter.get_finished_spans() if span.name == "chat sql"]) == 1


async def test_what_waits_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_WAITING", 2)
    exporter = InMemorySpanExporter()
    writer = a_writer(exporter)
    for _ in range(5):
        writer.add(TIMELINE)
    await writer.close()
    assert len([span for span in exporter.get_finished_spans() if span.name == "chat sql"]) == 2


def test_spans_are_sent_by_otlp() -> None:
    otlp_exporter("http://127.0.0.1:4318/v1/traces").shutdown()


async def test_what_is_being_written_at_the_end_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "PERIOD_S", 0.0)
    exporter, is_asked, may_answer = InMemorySpanExporter(), asyncio.Event(), asyncio.Event()

    async def slow(base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
        is_asked.set()
        await may_answer.wait()
        return {}

    writer = TraceWriter(exporter, slow, service="test", sample_ratio=1.0)
    writer.start()
    writer.add(TIMELINE)
    await is_asked.wait()
    closing = asyncio.create_task(writer.close())
    await asyncio.sleep(0)
    may_answer.set()
    await closing
    assert "chat sql" in [span.name for span in exporter.get_finished_spans()]
