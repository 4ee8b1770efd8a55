"""Files and batches behind the routes: everything is real but Ray between them, and the models."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

from app.access.tenants import KeyRing
from app.http.api import create_app
from app.settings import BatchSettings, LimitSettings
from deployments.batches.actor import Batches
from deployments.batches.client import BatchClient
from deployments.batches.values import Batch, InsideAnswer, InsideCall
from deployments.config import BatchesConfig
from deployments.gateway.inside import answer_inside
from tests.app.scripted_gateway import ScriptedGateway
from tests.contract.published import CHECKED
from tests.deployments.batches.batch_world import until_idle

Ask = Callable[[InsideCall], Awaitable[InsideAnswer]]


class LocalHandle:
    """A Serve handle on an actor in this process: a call is a task of this loop."""

    def __init__(self, actor: object) -> None:
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        def call(*args: object) -> Any:
            return asyncio.ensure_future(getattr(self._actor, name)(*args))

        return type("Method", (), {"remote": staticmethod(call)})


class BatchGateway(ScriptedGateway):
    """A scripted gateway with an actor that keeps files and runs batches by the application in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.actor: Batches | None = None

    async def start(self, config: BatchesConfig, app: FastAPI) -> None:
        """Start the actor, and wait until it has its folder."""
        self.actor = Batches.__new__(Batches)
        await Batches.__init__(self.actor, config, partial_ask(app))  # type: ignore[misc]
        self.batches = BatchClient(LocalHandle(self.actor))  # type: ignore[assignment,arg-type]
        while self.actor.store is None:
            await asyncio.sleep(0.001)

    async def ended(self, tenant: str, batch_id: str) -> Batch:
        """Wait until a batch has ended."""
        assert self.actor is not None
        await until_idle(self.actor)
        return await self.actor.batch(tenant, batch_id)


def partial_ask(app: FastAPI) -> Ask:
    async def ask(call: InsideCall) -> InsideAnswer:
        return await answer_inside(app, call)

    return ask


async def serve(
    folder: Path, ring: KeyRing | None = None, *, prefix: str = "", **bounds: int
) -> tuple[BatchGateway, httpx.AsyncClient]:
    """A gateway, and a client of the application in front of it, which Serve serves under a prefix."""
    gateway, settings = BatchGateway(), BatchSettings(max_file_bytes=20_000, **bounds)
    limits = LimitSettings(max_body_bytes=2000)
    app = create_app(gateway, limits=limits, key_ring=ring, batch_settings=settings)
    config = BatchesConfig(
        folder=str(folder),
        max_line_bytes=4000,
        **settings.model_dump(exclude={"folder", "max_file_bytes"}),
    )
    await gateway.start(config, app)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=prefix)
    return gateway, httpx.AsyncClient(transport=transport, base_url=f"http://test{prefix}", event_hooks=CHECKED)
