"""A gateway's view of the whole application: health, metrics, and the timelines of requests on any gateway."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.exposition import join, write
from deployments.generation import READY, HealthReport
from deployments.handle_calls import UNREACHED
from deployments.handles import ask_all, hear_all
from deployments.metrics import readiness
from deployments.timeline import Timeline, ask_traces, with_engine_stages
from deployments.waits import SharedCall
from engine.request import RequestId
from engine.trace import RequestTrace

PROBE_TIMEOUT_S = 3.0
SCRAPE_TIMEOUT_S = 8.0
"""Below Prometheus' own timeout of 10 s."""
PARTS_START_S, PARTS_POLL_S = 20.0, 0.2
"""How long a starting gateway waits for other parts, and how often it asks for them."""


class Overview:
    """Queries all gateways and all model replicas.

    Health and metrics need no key, and each query calls every replica: clients that ask at the same time share one.

    Args:
        models: handle of each base model's deployment, by name.
        parts: handles of other deployments that answers need; None for parts that run in the gateways' own processes.

    Attributes:
        health: reports whether every part that an answer needs has a replica that makes progress.
        metrics: returns the metrics of all gateways and engines, and readiness, in Prometheus text format.
    """

    def __init__(self, models: Mapping[str, DeploymentHandle], parts: Mapping[str, DeploymentHandle | None]) -> None:
        self._models = models
        self._parts = {name: handle for name, handle in parts.items() if handle is not None}
        self.health = SharedCall(self._ask_health).result
        self.metrics = SharedCall(self._ask_metrics).result

    async def until_parts_answer(self) -> None:
        """Wait until each part has a replica that answers, for up to `PARTS_START_S`.

        While a configuration that adds a part is rolled out, older gateways serve until a new one has started.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(PARTS_START_S):
                await asyncio.gather(*map(_until_answered, self._parts.values()))

    async def _ask_health(self) -> HealthReport:
        states = iter(await asyncio.gather(*map(_state, (*self._models.values(), *self._parts.values()))))
        return HealthReport(
            state_by_model={name: next(states) for name in self._models},
            state_by_part={name: next(states) for name in self._parts},
        )

    async def _ask_metrics(self) -> bytes:
        handles = (gateways(), *self._models.values())
        health, *answers = await asyncio.gather(
            self.health(), *(ask_all(handle, "metric_families", timeout_s=SCRAPE_TIMEOUT_S) for handle in handles)
        )
        return join([write([readiness(health)]), *(families for answer in answers for families in answer)])

    async def timelines(self, client_id: str) -> list[Timeline]:
        """Return the timelines of a client request's answers from all gateways; empty if unknown.

        Raises:
            UnavailableError: not every gateway has answered, so that it may be known.
        """
        answers = await hear_all(gateways(), "own_timelines", client_id, timeout_s=PROBE_TIMEOUT_S)
        found = sorted((timeline for answer in answers for timeline in answer), key=lambda one: one.arrived_unix_s)
        traces = await ask_traces(((one.base, one.attempts) for one in found), self.traces)
        return [replace(one, stages=with_engine_stages(one, traces)) for one in found]

    async def traces(self, base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
        """Return the engines' traces of attempts on a model; a `deployments.timeline.TraceSource`."""
        if not attempts or base not in self._models:
            return {}
        return ChainMap(*await ask_all(self._models[base], "traces", attempts, timeout_s=PROBE_TIMEOUT_S))


def gateways() -> DeploymentHandle:
    """Return the handle of this replica's own deployment."""
    context = serve.get_replica_context()
    return serve.get_deployment_handle(context.deployment, context.app_name)


async def _until_answered(handle: DeploymentHandle) -> None:
    while not await ask_all(handle, "trouble", timeout_s=PROBE_TIMEOUT_S):
        await asyncio.sleep(PARTS_POLL_S)


async def _state(handle: DeploymentHandle) -> str:
    troubles = await ask_all(handle, "trouble", timeout_s=PROBE_TIMEOUT_S)
    if not troubles:
        return READY if await _has_none_to_have(handle) else "No replica answers."
    return READY if None in troubles else str(troubles[0])


async def _has_none_to_have(handle: DeploymentHandle) -> bool:
    """Tell whether Serve has scaled the deployment to zero, or is just starting its first replica."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            status = await asyncio.to_thread(serve.status)
        deployment = status.applications[handle.app_name].deployments[handle.deployment_name]
    except (KeyError, *UNREACHED):
        return False
    if deployment.status == "HEALTHY":
        return not deployment.replica_states
    # A deployment that has lost its replicas is UNHEALTHY.
    return deployment.status in ("UPSCALING", "DOWNSCALING") and "RUNNING" not in deployment.replica_states
