"""Metrics, under the names that vLLM's dashboards and Kubernetes' inference gateways read.

Every process keeps its own metrics; a scrape queries all of them and joins their texts (`deployments.exposition`). Only
metrics that really exist here are exported. A replica's counters vanish with it, as on any restart of a server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, Metric, Summary
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from deployments.accounts.meter import Meter
from deployments.exposition import FamilyText, write
from deployments.gateway.front_gate import FrontGate
from deployments.generation import READY, HealthReport
from deployments.logs import dropped_lines
from deployments.slo import Slo
from deployments.timeline import CANCELLED, GOOD_OUTCOMES, Timeline
from engine.metrics import SIZE_BOUNDS, EngineSnapshot, Sizes

FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
    1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
BETWEEN_TOKENS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4,
    0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
NUM_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class GatewayMetrics:
    """One gateway's metrics of generations: by base model, plus a few series for each tenant and each requested name.

    Histograms are by base model: each has dozens of lines, too many to repeat for thousands of names. No series is by
    tenant and name: the product of both may be more than a scrape can bring. The ledger of usage has it.

    Args:
        slo: the objectives that answers are checked against; None for none.
        models: base models, whose rare counters start at zero: a counter that first appears at 1 shows no increase.
    """

    def __init__(self, slo: Slo | None = None, models: Iterable[str] = ()) -> None:
        self._slo = slo
        self._registry = CollectorRegistry()
        self._names: set[str] = set()
        """Names under which finished answers were requested."""
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_S
        )
        self._between = self._histogram(
            "inter_token_latency_seconds", "Between batches of tokens, for each token.", BETWEEN_TOKENS_S
        )
        # Needed for every token: looking up a child by its labels costs as much as counting.
        self._between_of: Callable[[str], Histogram] = cache(self._between.labels)
        self._per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time of an answer's tokens after the first.",
            BETWEEN_TOKENS_S,
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "From arrival to the last token.", REQUEST_S)
        self._prompt = self._histogram("request_prompt_tokens", "Tokens of prompts.", NUM_TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Tokens of answers.", NUM_TOKENS)
        self._ended = self._counter(
            "vllm:request_success", "Requests that ended well.", ("model_name", "finished_reason")
        )
        self._failed = self._counter(
            "antiphon:request_failure", "Requests that ended in an error.", ("model_name", "error")
        )
        self._resumed = self._counter("antiphon:resumed", "Generations taken to another replica.", ("model_name",))
        for model in models:
            self._resumed.labels(model)
        self._tokens = self._counter(
            "antiphon:tokens",
            "Tokens of answers that have ended: of prompts, of those from the prefix cache, of answers.",
            ("tenant", "model_name", "kind"),
        )
        self._requests = self._counter(
            "antiphon:requests", "Answers that have ended.", ("tenant", "model_name", "outcome")
        )
        self._tokens_by_name = self._counter(
            "antiphon:name_tokens", "The same tokens, by requested name.", ("model_name", "kind")
        )
        self._requests_by_name = self._counter(
            "antiphon:name_requests", "The same answers, by requested name.", ("model_name", "outcome")
        )
        self._slo_met = self._counter("antiphon:slo_met", "Answers inside every objective.", ("model_name",))
        self._slo_violated = self._counter(
            "antiphon:slo_violated",
            "Answers that missed an objective, each counted for the first that it missed.",
            ("model_name", "objective"),
        )
        self._first_by_name = Summary(
            "antiphon:time_to_first_token_seconds",
            "From arrival to the first token, of answers that have ended.",
            ("model_name",),
            registry=self._registry,
        )

    def count_answer(self, timeline: Timeline) -> None:
        """Count an answer that has ended, however it ended."""
        self._names.add(timeline.model)
        missed = None if self._slo is None else self._slo.missed(timeline)
        if missed is not None:
            # Create the series with the first answer, met or not: a sum with a missing series is empty.
            self._slo_met.labels(timeline.model).inc(not missed)
        if missed:
            self._slo_violated.labels(timeline.model, missed[0]).inc()
        self._requests.labels(timeline.tenant, timeline.base, timeline.outcome).inc()
        self._requests_by_name.labels(timeline.model, timeline.outcome).inc()
        if timeline.outcome not in GOOD_OUTCOMES:
            self._failed.labels(timeline.base, timeline.outcome).inc()
        elif timeline.outcome != CANCELLED:
            self._count_success(timeline)
        if timeline.first_token_s is not None:
            self._first_by_name.labels(timeline.model).observe(timeline.first_token_s)
        if timeline.was_refused:
            # Its prompt was not computed, and comes again with each attempt of its client.
            return
        for kind, count in (
            ("input", timeline.num_prompt_tokens),
            ("cached", timeline.num_cached_tokens),
            ("output", timeline.num_tokens),
        ):
            self._tokens.labels(timeline.tenant, timeline.base, kind).inc(count)
            self._tokens_by_name.labels(timeline.model, kind).inc(count)

    def count_first_token(self, model: str, waited_s: float) -> None:
        """Record the time to the first token of an answer."""
        self._first_token.labels(model).observe(waited_s)

    def count_tokens(self, model: str, num_tokens: int, since_last_s: float) -> None:
        """Record tokens after the first that came together, and the time since the previous ones."""
        histogram = self._between_of(model)
        for _ in range(num_tokens):
            histogram.observe(since_last_s / num_tokens)

    def count_resumption(self, model: str) -> None:
        """Count a generation that moved to another replica."""
        self._resumed.labels(model).inc()

    def forget_all_but(self, is_served: Callable[[str], bool]) -> None:
        """Drop the series of names no longer served, which would accumulate; callable from any thread."""
        gone = {name for name in self._names.copy() if not is_served(name)}
        if not gone:
            return
        self._names -= gone
        by_name = self._tokens_by_name, self._requests_by_name, self._first_by_name
        for metric in (*by_name, self._slo_met, self._slo_violated):
            # `remove_by_labels` would look through all series for each name: minutes for thousands of both.
            samples = [sample for family in metric.collect() for sample in family.samples]
            for values in {tuple(s.labels.values()) for s in samples if s.labels["model_name"] in gone}:
                metric.remove(*values)

    def text(self, gateway: str, others: Sequence[Metric] = ()) -> dict[str, FamilyText]:
        """Return these metrics and `others`, each labeled with the gateway's name; callable from any thread."""
        return write(_labeled(family, {"gateway": gateway}) for family in (*self._registry.collect(), *others))

    def _count_success(self, timeline: Timeline) -> None:
        self._ended.labels(timeline.base, timeline.outcome).inc()
        self._whole.labels(timeline.base).observe(timeline.end_s or 0.0)
        if timeline.tpot_s is not None:
            self._per_token.labels(timeline.base).observe(timeline.tpot_s)
        self._prompt.labels(timeline.base).observe(timeline.num_prompt_tokens)
        self._generated.labels(timeline.base).observe(timeline.num_tokens)

    def _counter(self, name: str, about: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, about, labels, registry=self._registry)

    def _histogram(self, name: str, about: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"vllm:{name}", about, ("model_name",), registry=self._registry, buckets=buckets)


def readiness(report: HealthReport) -> Metric:
    """Return the state that `/health` reports as a gauge."""
    about = "1 where `/health` calls a model, or another part of what answers need, ready; else 0."
    family = GaugeMetricFamily("antiphon:ready", about, labels=("model_name", "part"))
    for model, state in report.state_by_model.items():
        family.add_metric((model, ""), float(state == READY))
    for part, state in report.state_by_part.items():
        family.add_metric(("", part), float(state == READY))
    return family


def gateway_families(
    gates: Mapping[str, FrontGate], meter: Meter | None = None, verdicts: Mapping[str, int] | None = None
) -> list[Metric]:
    """Return the metrics that a gateway's other parts count, besides `GatewayMetrics`.

    Args:
        verdicts: number of texts by what the classifier said of them; None for none.
    """
    families = [] if meter is None else _meter_families(meter)
    about = "Texts by what the safety classifier said of them, if anything in time."
    families.append(_counts_by("outcome", "antiphon:safety_verdicts", about, verdicts or {}))
    families += [_labeled(_rejections(gate.refused_by_reason), {"model_name": model}) for model, gate in gates.items()]
    return [*families, _dropped_lines()]


def _labeled(family: Metric, labels: dict[str, str]) -> Metric:
    """Give all samples of a family further labels, and return it."""
    family.samples = [sample._replace(labels=sample.labels | labels) for sample in family.samples]
    return family


def _rejections(refused_by_reason: Mapping[str, int]) -> Metric:
    about = "Requests refused at once, for want of time or room."
    return _counts_by("reason", "vllm:admission_rejections", about, refused_by_reason)


def _dropped_lines() -> Metric:
    about = "Lines of logs that this process could not write."
    return _counts_by("reason", "antiphon:log_lines_dropped", about, dropped_lines())


def _counts_by(label: str, name: str, about: str, counts: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(name, about, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family


def _meter_families(meter: Meter) -> list[Metric]:
    refused = CounterMetricFamily(
        "antiphon:rate_limited", "Answers that were not begun for a tenant's limit.", labels=("tenant", "limit")
    )
    for (tenant, limit), count in meter.refused.items():
        refused.add_metric((tenant, limit), count)
    spool = meter.spool
    return [
        refused,
        CounterMetricFamily(
            "antiphon:unchecked_requests", "Answers begun while limits could not be asked for.", meter.num_unchecked
        ),
        GaugeMetricFamily(
            "antiphon:usage_pending",
            "Usage records that are not stored yet.",
            spool.num_pending + spool.num_set_aside,
        ),
        GaugeMetricFamily(
            "antiphon:usage_unwritten",
            "Of those, records in memory only: the disk is full.",
            spool.num_unwritten,
        ),
        CounterMetricFamily("antiphon:usage_lost", "Usage records for which there was no room.", spool.num_lost),
    ]


_Number = tuple[str, str, Callable[[EngineSnapshot], float]]

_GAUGES: tuple[_Number, ...] = (
    ("vllm:num_requests_running", "Requests in the batch.", lambda s: s.num_running),
    ("vllm:num_requests_waiting", "Requests that wait for a row in the batch.", lambda s: s.num_waiting),
    ("vllm:kv_cache_usage_perc", "Share of the KV cache held by requests, 0 to 1.", lambda s: s.kv_usage),
    ("antiphon:num_adapters_resident", "Adapters on the device.", lambda s: s.num_resident_adapters),
)
_COUNTS: tuple[_Number, ...] = (
    ("vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", lambda s: s.counters.prefix_queries),
    ("vllm:prefix_cache_hits", "Tokens found in the prefix cache.", lambda s: s.counters.prefix_hits),
    ("antiphon:kv_tier_stored_tokens", "Tokens whose blocks were copied to lower tiers.", lambda s: s.stored_tokens),
    ("antiphon:kv_tier_fetched_tokens", "Tokens whose blocks were copied from there.", lambda s: s.fetched_tokens),
    ("vllm:num_preemptions", "Requests put back to wait for memory.", lambda s: s.counters.num_preemptions),
    ("vllm:prompt_tokens", "Prompt tokens of requests admitted.", lambda s: s.counters.prompt_tokens),
    ("vllm:generation_tokens", "Tokens generated.", lambda s: s.counters.generation_tokens),
    ("antiphon:forced_tokens", "Tokens that a grammar left no choice of.", lambda s: s.counters.forced_tokens),
    ("vllm:spec_decode_num_drafts", "Drafts computed.", lambda s: s.counters.num_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Tokens of drafts computed.", lambda s: s.counters.num_draft_tokens),
    ("vllm:spec_decode_num_accepted_tokens", "Those of them drawn.", lambda s: s.counters.num_accepted_tokens),
    ("antiphon:engine_steps", "Steps of the engine.", lambda s: s.num_steps),
    ("antiphon:adapter_loads", "Adapters read into memory.", lambda s: s.adapter_loads.num_loaded),
    ("antiphon:adapter_load_failures", "Attempts at it that failed.", lambda s: s.adapter_loads.num_failed),
    ("antiphon:adapter_load_bytes", "Bytes of those adapters.", lambda s: s.adapter_loads.num_bytes),
    ("antiphon:adapter_load_seconds", "Time that reading them took.", lambda s: s.adapter_loads.seconds),
)


class EngineMetrics:
    """Metrics of one engine.

    Args:
        model: public name of the base model.
        engine: distinguishes the replicas of one model.
    """

    def __init__(self, model: str, engine: str) -> None:
        self._labels = {"model_name": model, "engine": engine}
        self._registry = CollectorRegistry()
        self._queue = self._histogram("request_queue_time_seconds", "From arrival in the engine to a row in its batch.")
        self._prefill = self._histogram("request_prefill_time_seconds", "From a row in the batch to the first token.")
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the last.")

    def families(self, snapshot: EngineSnapshot, *others: Metric) -> list[Metric]:
        """Return the metrics of a snapshot that was taken with `drain_ended`, and others that lack its labels."""
        for trace in snapshot.ended:
            for histogram, seconds in (
                (self._queue, trace.queue_s),
                (self._prefill, trace.prefill_s),
                (self._decode, trace.decode_s),
            ):
                if seconds is not None:
                    histogram.labels(**self._labels).observe(seconds)
        ended = snapshot.counters.ended_by_reason
        families = [
            *(GaugeMetricFamily(name, about, value(snapshot)) for name, about, value in _GAUGES),
            *(CounterMetricFamily(name, about, value(snapshot)) for name, about, value in _COUNTS),
            _sizes("antiphon:iteration_requests", "Requests of each step.", snapshot.step_requests),
            _sizes("vllm:iteration_tokens_total", "Tokens of each step.", snapshot.step_tokens),
            _cache_info(snapshot),
            _counts_by("reason", "antiphon:engine_requests_ended", "Requests that left the engine.", ended),
            _rejections(snapshot.refused_by_reason),
            _dropped_lines(),
            _step_times(snapshot),
            *others,
        ]
        return [*(_labeled(family, self._labels) for family in families), *self._registry.collect()]

    def _histogram(self, name: str, about: str) -> Histogram:
        return Histogram(f"vllm:{name}", about, tuple(self._labels), registry=self._registry, buckets=REQUEST_S)


def lora_requests(running: Iterable[str], waiting: Iterable[str], max_running: int) -> Metric:
    """Return the adapters in use by name, as Kubernetes' inference gateways read them: the newest line counts.

    Args:
        running, waiting: names of adapters that requests compute with, and that requests wait for.
        max_running: how many can be in use at the same time.
    """
    labels = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")
    family = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use; the value is the time.", labels=labels)
    family.add_metric((str(max_running), ",".join(sorted(running)), ",".join(sorted(waiting))), time.time())
    return family


def _sizes(name: str, about: str, sizes: Sizes) -> Metric:
    bounds = [*(str(float(bound)) for bound in SIZE_BOUNDS), "+Inf"]
    buckets = [*zip(bounds, accumulate(sizes.counts), strict=True)]
    return HistogramMetricFamily(name, about, buckets=buckets, sum_value=sizes.total)


def _step_times(snapshot: EngineSnapshot) -> Metric:
    parts = ("schedule", "prepare", "forward", "sample", "wait", "emit")
    seconds = {part: getattr(snapshot.step_times, f"{part}_s") for part in parts}
    return _counts_by("part", "antiphon:engine_step_seconds", "Time spent in each part of a step.", seconds)


def _cache_info(snapshot: EngineSnapshot) -> Metric:
    labels = ("block_size", "num_gpu_blocks")
    family = GaugeMetricFamily("vllm:cache_config_info", "Geometry of the KV cache.", labels=labels)
    family.add_metric((str(snapshot.block_tokens), str(snapshot.num_blocks)), 1)
    return family
