from __future__ import annotations

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from deployments.exposition import join, write
from deployments.metrics import GatewayMetrics
from deployments.timeline import Timeline


def counter(engine: str, value: float) -> CounterMetricFamily:
    family = CounterMetricFamily("vllm:x", 'Of "x",\nall.', labels=("engine",))
    family.add_metric((engine,), value)
    return family


def test_families_of_many_processes_become_one() -> None:
    gauge = GaugeMetricFamily("antiphon:y", "Of y.", value=3)
    text = join([write([counter("a", 1), gauge, counter("b", 2)]), write([counter("c", 4)])]).decode()
    x, y = text_string_to_metric_families(text)
    assert {sample.labels["engine"]: sample.value for sample in x.samples} == {"a": 1, "b": 2, "c": 4}
    assert (y.type, [sample.value for sample in y.samples]) == ("gauge", [3])
    assert text.count("# TYPE") == 2


def test_a_family_without_samples_is_told_of() -> None:
    assert join([write([CounterMetricFamily("z", "Of z.")])]) == b"# HELP z_total Of z.\n# TYPE z_total counter\n"


def test_when_a_counter_began_is_not_told_and_every_sample_has_its_gateway() -> None:
    metrics = GatewayMetrics()
    metrics.count_answer(Timeline(request_id="r", model="sql", base="sql", arrived_unix_s=0.0, outcome="stop"))
    found = [*text_string_to_metric_families(join([metrics.text("g")]).decode())]
    samples = [sample for family in found for sample in family.samples]
    assert not [sample for sample in samples if sample.name.endswith("_created")]
    assert {sample.labels["gateway"] for sample in samples} == {"g"}
    assert (
        'vllm:request_success_total{finished_reason="stop",gateway="g",model_name="sql"} 1.0'
        in join([metrics.text("g")]).decode()
    )
