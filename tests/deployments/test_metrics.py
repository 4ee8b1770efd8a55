from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from adapters.loads import AdapterLoads
from deployments.exposition import join, write
from deployments.generation import READY, HealthReport
from deployments.metrics import EngineMetrics, GatewayMetrics, lora_requests, readiness
from deployments.slo import Slo
from deployments.timeline import Timeline
from engine.metrics import SIZE_BOUNDS, EngineSnapshot, SchedulerCounters, Sizes, StepTimes


def answered(metrics: GatewayMetrics, model: str) -> None:
    metrics.count_first_token("chat", 0.1)
    metrics.count_tokens("chat", 2, 0.1)
    metrics.count_resumption("chat")
    for outcome in ("stop", "EngineError"):
        timeline = Timeline(request_id="r", model=model, base="chat", arrived_unix_s=0.0, outcome=outcome)
        timeline.first_token_s = 0.1
        metrics.count_answer(timeline)


def lines(metrics: GatewayMetrics) -> list[str]:
    return join([metrics.text("g")]).decode().splitlines()


def test_how_full_batches_are_is_told_as_prometheus_reads_it() -> None:
    sizes = Sizes()
    for size in (1, 3, 3, SIZE_BOUNDS[-1] + 1):
        sizes.add(size)
    snapshot = EngineSnapshot(
        num_running=0, num_waiting=0, step_requests=Sizes(), step_tokens=sizes, last_progress_s=0.0, kv_usage=0.0,
        num_blocks=1, block_tokens=16, counters=SchedulerCounters(), refused_by_reason={}, step_times=StepTimes(),
        num_resident_adapters=0, adapter_loads=AdapterLoads(),
    )  # fmt: skip
    text = join([write(EngineMetrics("m", "e").families(snapshot))]).decode()
    [told] = [one for one in text_string_to_metric_families(text) if one.name == "vllm:iteration_tokens_total"]
    count_by_bound = {sample.labels["le"]: sample.value for sample in told.samples if "le" in sample.labels}
    assert told.type == "histogram"
    assert [count_by_bound[bound] for bound in ("1.0", "2.0", "4.0", "+Inf")] == [1, 1, 3, 4]
    assert {sample.name: sample.value for sample in told.samples if "le" not in sample.labels} == {
        "vllm:iteration_tokens_total_count": 4,
        "vllm:iteration_tokens_total_sum": 7 + SIZE_BOUNDS[-1] + 1,
    }
    assert 'antiphon:engine_steps_total{engine="e",model_name="m"} 4.0' in text.splitlines()


def test_an_adapter_costs_a_few_lines_however_much_is_told_of_its_base() -> None:
    metrics = GatewayMetrics(Slo(e2e_s=1.0))
    answered(metrics, "chat")
    before = lines(metrics)
    answered(metrics, "sql")
    assert [line for line in before if line.startswith("vllm:") and 'model_name="chat"' in line]
    told = [line for line in lines(metrics) if 'model_name="sql"' in line]
    assert len(told) == len(lines(metrics)) - len(before) < 10
    assert 'antiphon:time_to_first_token_seconds_sum{gateway="g",model_name="sql"} 0.2' in told


def test_tenants_and_names_add_up_and_do_not_multiply() -> None:
    """A gateway that had answered for 5,000 names and ten tenants had 22 MB to tell: no scrape brought any of it."""
    metrics = GatewayMetrics(Slo(e2e_s=1.0))
    for tenant in ("blue", "red", "green"):
        for n in range(20):
            timeline = Timeline(
                request_id="r", tenant=tenant, model=f"trial-{n}", base="chat", arrived_unix_s=0.0, outcome="stop"
            )
            timeline.num_prompt_tokens = 7
            metrics.count_answer(timeline)
    told = lines(metrics)
    assert not [line for line in told if "tenant=" in line and "trial-" in line]
    blue = '{gateway="g",kind="input",model_name="chat",tenant="blue"}'
    assert f"antiphon:tokens_total{blue} 140.0" in told
    assert 'antiphon:requests_total{gateway="g",model_name="chat",outcome="stop",tenant="red"} 20.0' in told
    assert 'antiphon:name_tokens_total{gateway="g",kind="input",model_name="trial-3"} 21.0' in told
    assert 'antiphon:name_requests_total{gateway="g",model_name="trial-3",outcome="stop"} 3.0' in told


def test_names_that_are_served_no_more_leave_nothing_behind() -> None:
    metrics = GatewayMetrics(Slo(e2e_s=1.0))
    answered(metrics, "sql")
    for n in range(20):
        answered(metrics, f"trial-{n}")
    metrics.forget_all_but({"sql"}.__contains__)
    assert [line for line in lines(metrics) if 'model_name="sql"' in line]
    assert not [line for line in lines(metrics) if "trial" in line]
    answered(metrics, "trial-3")
    assert [line for line in lines(metrics) if 'model_name="trial-3"' in line]


def test_thousands_of_names_are_forgotten_at_once() -> None:
    """It took over ten minutes, in which the gateway's streams had to share the interpreter with it."""
    metrics = GatewayMetrics(Slo(e2e_s=1.0))
    for n in range(5000):
        metrics.count_answer(
            Timeline(request_id="r", model=f"trial-{n}", base="chat", arrived_unix_s=0.0, outcome="stop", end_s=1.0)
        )
    metrics.forget_all_but({"trial-7"}.__contains__)
    assert {line.partition("trial-")[2].partition('"')[0] for line in lines(metrics) if "trial-" in line} == {"7"}


def test_the_tokens_of_a_refused_prompt_do_not_count() -> None:
    """With each attempt of its client they counted once more."""
    metrics = GatewayMetrics()
    for outcome, num_tokens in (("OverloadError", 0), ("TimeoutError", 0), ("RequestError", 2)):
        timeline = Timeline(request_id="r", model="sql", base="base", arrived_unix_s=0.0, outcome=outcome)
        timeline.num_prompt_tokens, timeline.num_tokens = 7, num_tokens
        metrics.count_answer(timeline)
    (line,) = [line for line in lines(metrics) if "antiphon:tokens_total" in line and 'kind="input"' in line]
    assert line.endswith(" 14.0")


def test_whatever_an_answer_is_it_counts_as_a_success_a_failure_or_neither() -> None:
    """Embeddings and rankings counted where they failed only: all of a model's requests seemed to fail."""
    metrics = GatewayMetrics()
    for operation in ("chat", "embeddings", "rerank"):
        for outcome in ("stop", "EngineError", "cancelled"):
            metrics.count_answer(
                Timeline(
                    request_id="r",
                    model="sql",
                    base="base",
                    operation=operation,
                    arrived_unix_s=0.0,
                    outcome=outcome,
                    num_prompt_tokens=7,
                    end_s=0.4,
                )
            )
    told = lines(metrics)
    assert 'vllm:request_success_total{finished_reason="stop",gateway="g",model_name="base"} 3.0' in told
    assert 'antiphon:request_failure_total{error="EngineError",gateway="g",model_name="base"} 3.0' in told
    assert 'vllm:request_prompt_tokens_sum{gateway="g",model_name="base"} 21.0' in told
    assert 'vllm:e2e_request_latency_seconds_count{gateway="g",model_name="base"} 3.0' in told


def test_the_first_replica_that_dies_is_an_increase() -> None:
    """Prometheus takes what a series begins with for what it always was."""
    metrics = GatewayMetrics(models=["chat"])
    assert 'antiphon:resumed_total{gateway="g",model_name="chat"} 0.0' in lines(metrics)


def test_where_every_answer_misses_its_objectives_the_share_that_does_can_be_told() -> None:
    """A sum with a series that is not there is empty, and the alert was silent."""
    metrics = GatewayMetrics(Slo(e2e_s=1e-9))
    late = Timeline(request_id="r", model="chat", base="chat", arrived_unix_s=0.0, outcome="stop", end_s=1.0)
    metrics.count_answer(late)
    assert 'antiphon:slo_met_total{gateway="g",model_name="chat"} 0.0' in lines(metrics)
    assert 'antiphon:slo_violated_total{gateway="g",model_name="chat",objective="e2e"} 1.0' in lines(metrics)


@pytest.mark.parametrize(("outcome", "is_success"), [("cancelled", False), ("stop", True)])
def test_an_answer_whose_client_left_is_no_success(outcome: str, is_success: bool) -> None:
    metrics = GatewayMetrics()
    metrics.count_answer(Timeline(request_id="r", model="m", base="m", arrived_unix_s=0.0, outcome=outcome))
    assert is_success == any(line.startswith("vllm:request_success_total{") for line in lines(metrics))


def test_what_health_says_is_told_in_numbers() -> None:
    states = {"chat": READY, "draft": "No replica answers."}
    report = HealthReport(state_by_model=states, state_by_part={"safety": "it hangs"})
    told = join([write([readiness(report)])]).decode().splitlines()
    assert [line for line in told if not line.startswith("#")] == [
        'antiphon:ready{model_name="chat",part=""} 1.0',
        'antiphon:ready{model_name="draft",part=""} 0.0',
        'antiphon:ready{model_name="",part="safety"} 0.0',
    ]


def test_adapters_in_use_are_listed_as_a_gateway_of_kubernetes_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 1.5e9)
    [line] = [
        line
        for line in join([write([lora_requests({"b", "a"}, set(), 64)])]).decode().splitlines()
        if not line.startswith("#")
    ]
    assert line == (
        'vllm:lora_requests_info{max_lora="64",running_lora_adapters="a,b",waiting_lora_adapters=""} 1.5e+09'
    )


def test_the_time_of_an_answers_tokens_is_told_without_the_first() -> None:
    metrics = GatewayMetrics()
    for num_tokens in (1, 5):
        metrics.count_answer(
            Timeline(
                request_id="r",
                model="base",
                base="base",
                arrived_unix_s=0.0,
                outcome="stop",
                first_token_s=1.0,
                end_s=3.0,
                num_tokens=num_tokens,
            )
        )
    name = "vllm:request_time_per_output_token_seconds"
    assert f'{name}_sum{{gateway="g",model_name="base"}} 0.5' in lines(metrics)
    assert f'{name}_count{{gateway="g",model_name="base"}} 1.0' in lines(metrics)
