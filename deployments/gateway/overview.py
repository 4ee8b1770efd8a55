"""A gateway's view of the whole application: health, metrics, and the timelines of requests on any gateway."""

from __future__ import annotations

import asyncio
from collections import ChainMap
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from deployments.exposition import join, write
from deployments.generation import READY, HealthReport
from deployments.handle_calls import UNREACHED, ask_all, connected_handle
from deployments.metrics import readiness
from deployments.timeline import Timeline, ask_traces, with_engine_stages
from deployments.waits import SharedCall
from engine.request import RequestId
from engine.trace import RequestTrace

PROBE_TIMEOUT_S = 3.0
SCRAPE_TIMEOUT_S = 8.0
"""Below Prometheus' own timeout of 10 s."""
PARTS_START_S, PARTS_POLL_S = 20.0, 0.5
"""How long a starting gateway waits for other parts, and how often it asks for them."""


@dataclass(frozen=True, slots=True)
class _Found:
    """What the replicas of a deployment answer, each None or its trouble, and what Serve says if none answers."""

    answers: list[str | None]
    told: DeploymentStatusOverview | None

    @property
    def is_at_zero(self) -> bool:
        """Whether Serve has scaled the deployment to zero."""
        return self.told is not None and self.told.status == "HEALTHY" and not self.told.replica_states

    def state(self) -> str:
        if self.answers:
            return READY if None in self.answers else str(self.answers[0])
        return READY if self.is_at_zero or self._is_between() else "No replica answers."

    def _is_between(self) -> bool:
        """Whether Serve starts the first replica or stops the last one; one that has lost them is UNHEALTHY."""
        told = self.told
        return told is not None and told.status in ("UPSCALING", "DOWNSCALING") and "RUNNING" not in told.replica_states


class Overview:
    """Queries all gateways and all model replicas.

    Health and metrics need no key, and each query calls every replica: clients that ask at the same time share one.

    Args:
        replicas: handle of each base model's deployment, by name.
        parts: handles of other deployments that answers need; None for parts that run in the gateways' own processes.

    Attributes:
        health: reports whether every part that an answer needs has a replica that makes progress.
        metrics: returns the metrics of all gateways and engines, and readiness, in Prometheus text format.
    """

    def __init__(self, replicas: Mapping[str, DeploymentHandle], parts: Mapping[str, DeploymentHandle | None]) -> None:
        self._replicas = replicas
        self._parts = {name: handle for name, handle in parts.items() if handle is not None}
        self.health = SharedCall(self._ask_health).result
        self.metrics = SharedCall(self._ask_metrics).result
        # Two threads must not be in `serve.status` at once: while it reads how a deployment scales, it changes globals.
        self._serve_status = SharedCall(lambda: asyncio.to_thread(serve.status)).result
        self._last_told: dict[str, DeploymentStatusOverview] = {}

    async def until_parts_answer(self) -> None:
        """Wait until each part has a replica that answers or is scaled to zero, for up to `PARTS_START_S`.

        While a configuration that adds a part is rolled out, older gateways serve until a new one has started.
        """
        if ray.is_initialized():
            # So that it is known when the first scrape finds no controller (`connected_handle`).
            gateways()
        with suppress(TimeoutError):
            async with asyncio.timeout(PARTS_START_S):
                while not all(found.answers or found.is_at_zero for found in await self._ask(self._parts.values())):
                    await asyncio.sleep(PARTS_POLL_S)

    async def _ask_health(self) -> HealthReport:
        found = await self._ask([*self._replicas.values(), *self._parts.values()])
        states = (one.state() for one in found)
        return HealthReport(
            state_by_model={name: next(states) for name in self._replicas},
            state_by_part={name: next(states) for name in self._parts},
        )

    async def _ask(self, handles: Collection[DeploymentHandle]) -> list[_Found]:
        """Ask each deployment's replicas for trouble, and Serve about deployments without an answer."""
        answers = await asyncio.gather(*(ask_all(one, "trouble", timeout_s=PROBE_TIMEOUT_S) for one in handles))
        applications: Mapping[str, ApplicationStatusOverview] = {}
        if not all(answers):
            with suppress(*UNREACHED):
                async with asyncio.timeout(PROBE_TIMEOUT_S):
                    applications = (await self._serve_status()).applications
        return [
            _Found(told, None if told else self._deployment(applications, one))
            for told, one in zip(answers, handles, strict=True)
        ]

    def _deployment(
        self, applications: Mapping[str, ApplicationStatusOverview], handle: DeploymentHandle
    ) -> DeploymentStatusOverview | None:
        name, application = handle.deployment_name, applications.get(handle.app_name)
        if application is None:
            return None
        if application.deployments or application.status != "DEPLOYING":
            told = application.deployments.get(name)
            if told is not None:
                self._last_told[name] = told
            return told
        # While Serve builds a changed configuration it lists no deployments, and runs those that it had.
        return self._last_told.get(name)

    async def _ask_metrics(self) -> bytes:
        handles = (gateways(), *self._replicas.values())
        health, *answers = await asyncio.gather(
            self.health(), *(ask_all(handle, "metric_families", timeout_s=SCRAPE_TIMEOUT_S) for handle in handles)
        )
        return join([write([readiness(health)]), *(families for answer in answers for families in answer)])

    async def timelines(self, client_id: str) -> list[Timeline]:
        """Return the timelines of a client request's answers from all gateways; empty if unknown.

        Raises:
            UnavailableError: not every gateway has answered, so that it may be known.
        """
        answers = await ask_all(gateways(), "own_timelines", client_id, timeout_s=PROBE_TIMEOUT_S, needs_all=True)
        found = sorted((timeline for answer in answers for timeline in answer), key=lambda one: one.arrived_unix_s)
        traces = await ask_traces(((one.base, one.called_s_by_attempt) for one in found), self.traces)
        return [replace(one, stages=with_engine_stages(one, traces)) for one in found]

    async def traces(self, base: str, attempts: Sequence[RequestId]) -> Mapping[RequestId, RequestTrace]:
        """Return the engines' traces of attempts on a model; a `deployments.timeline.TraceSource`."""
        if not attempts or base not in self._replicas:
            return {}
        return ChainMap(*await ask_all(self._replicas[base], "traces", attempts, timeout_s=PROBE_TIMEOUT_S))


def gateways() -> DeploymentHandle:
    """Return the handle of this replica's own deployment."""
    return connected_handle(serve.get_replica_context().deployment)
