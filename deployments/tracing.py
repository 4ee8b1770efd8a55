"""OpenTelemetry traces of answers, written from the timeline after an answer has ended, at no cost to it.

Each answer has one span, a child of the client's `traceparent` (W3C Trace Context), and one for each stage. Attributes
follow OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from deployments.timeline import GOOD_OUTCOMES, Stage, Timeline, TraceSource, ask_traces, with_engine_stages
from deployments.waits import for_ever

PERIOD_S = 1.0
MAX_WAITING = 10_000
"""Bound on finished answers that are not written yet; further ones are not traced."""
MAX_SPANS = 10 * MAX_WAITING
"""Bound on spans that are not sent yet: an answer has some ten."""


class TraceWriter:
    """Writes the traces of one gateway's answers.

    Args:
        traces: maps a base model and attempts to its engines' traces of them.
        sample_ratio: share of the answers that are traced if the client has not decided.
    """

    def __init__(self, exporter: SpanExporter, traces: TraceSource, *, service: str, sample_ratio: float) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": service}),
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_SPANS))
        self._tracer = self._provider.get_tracer("antiphon")
        self._traces = traces
        self._waiting: list[Timeline] = []
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start writing periodically."""
        pause = partial(asyncio.sleep, PERIOD_S)
        self._task = asyncio.create_task(for_ever(self.write, pause, "traces could not be written"))

    def add(self, timeline: Timeline) -> None:
        """Queue an answer that has ended; dropped if too many wait."""
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append(timeline)

    async def write(self) -> None:
        """Write the queued answers together with the engines' traces of them."""
        async with self._writing:
            waiting, self._waiting = self._waiting, []
            traces = await ask_traces(
                ((timeline.base, timeline.called_s_by_attempt) for timeline in waiting), self._traces
            )
            for timeline in waiting:
                self._write(timeline, with_engine_stages(timeline, traces))
                # A thousand answers take half a second, in which streams would stand still.
                await asyncio.sleep(0)

    async def close(self) -> None:
        """Write the remaining answers and wait until they have been sent."""
        async with self._writing:
            # Under the lock, so that the task is not canceled between taking answers and writing them.
            if self._task is not None:
                self._task.cancel()
        await self.write()
        await asyncio.to_thread(self._provider.shutdown)

    def _write(self, timeline: Timeline, stages: Sequence[Stage]) -> None:
        parent = TraceContextTextMapPropagator().extract({"traceparent": timeline.trace_parent})
        span = self._tracer.start_span(
            f"{timeline.operation} {timeline.model}",
            context=parent,
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(timeline.arrived_unix_s),
            attributes={
                "gen_ai.operation.name": timeline.operation,
                "gen_ai.request.model": timeline.model,
                "gen_ai.response.model": timeline.base,
                "gen_ai.response.finish_reasons": [timeline.outcome],
                "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
                "gen_ai.usage.output_tokens": timeline.num_tokens,
                "antiphon.request_id": timeline.request_id,
                "antiphon.tenant": timeline.tenant,
                "antiphon.adapter": timeline.adapter,
                "antiphon.cached_tokens": timeline.num_cached_tokens,
                "antiphon.num_attempts": len(timeline.called_s_by_attempt),
            },
        )
        if timeline.outcome not in GOOD_OUTCOMES:
            span.set_status(Status(StatusCode.ERROR, timeline.outcome))
        if timeline.first_token_s is not None:
            span.add_event("first token", timestamp=_nanoseconds(timeline.arrived_unix_s + timeline.first_token_s))
        inside = set_span_in_context(span)
        for stage in stages:
            child = self._tracer.start_span(
                stage.name, context=inside, start_time=_nanoseconds(timeline.arrived_unix_s + stage.start_s)
            )
            child.end(_nanoseconds(timeline.arrived_unix_s + stage.end_s))
        span.end(_nanoseconds(timeline.arrived_unix_s + (timeline.end_s or 0.0)))


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Return an exporter that sends spans to a collector by OTLP over HTTP.

    Raises:
        ImportError: the package `opentelemetry-exporter-otlp-proto-http` is not installed.
    """
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint)


def _nanoseconds(unix_s: float) -> int:
    return int(unix_s * 1e9)
