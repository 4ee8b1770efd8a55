from __future__ import annotations

from deployments.exposition import join
from deployments.metrics import GatewayMetrics
from deployments.slo import Slo
from deployments.timeline import Timeline


def answered(metrics: GatewayMetrics, model: str) -> None:
    metrics.count_first_token(model, 0.1)
    metrics.count_tokens(model, 2, 0.1)
    metrics.count_resumption(model)
    metrics.count_end(model, "stop", num_prompt_tokens=3, num_tokens=5, took_s=0.2)
    for outcome in ("stop", "EngineError"):
        metrics.count_answer(Timeline(request_id="r", model=model, base="chat", arrived_unix_s=0.0, outcome=outcome))


def test_names_that_are_served_no_more_leave_nothing_behind() -> None:
    metrics = GatewayMetrics(Slo(e2e_s=1.0))
    answered(metrics, "sql")
    before = join([metrics.text("g")])
    for n in range(20):
        answered(metrics, f"trial-{n}")
    metrics.forget_all_but({"sql"}.__contains__)
    assert join([metrics.text("g")]) == before
    answered(metrics, "trial-3")
    assert b'model_name="trial-3"' in join([metrics.text("g")])
