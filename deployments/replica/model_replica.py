"""The actor that hosts one engine: its life-cycle, its health, and what Serve and gateways ask of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ray import serve

from adapters.identity import AdapterDigest
from deployments.accounts.orphans import OrphanRecorder
from deployments.actor_process import begin_actor
from deployments.channel.token_channel import ChannelDialer
from deployments.config import AdapterCacheConfig, ChannelConfig, ModelConfig
from deployments.exposition import FamilyText, write
from deployments.generation_calls import GenerationCall, GenerationResult, TokenAddress
from deployments.metrics import EngineMetrics
from deployments.replica.adapter_files import Locator, locator
from deployments.replica.engine_thread import MAX_STEP_S_BY_DEVICE
from deployments.replica.replica_server import ReplicaServer
from deployments.routing.reporter import ReplicaName
from engine.errors import EngineError
from engine.request import Emission, RequestId
from engine.trace import RequestTrace

if TYPE_CHECKING:
    from engine.engine import Engine


class ModelReplica:
    """One replica of one base model and all its adapters; the deployment is named `Model-<name>`."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ModelConfig,
        channel: ChannelConfig,
        *,
        has_accounts: bool = False,
        adapter_cache: AdapterCacheConfig | None = None,
    ) -> None:
        """Load the model, off the event loop, and start the engine; Serve awaits it.

        Args:
            has_accounts: whether there is somebody to record what dead gateways cannot.
            adapter_cache: None where there is no registry that could have adapters' files.

        Raises:
            CheckpointError, ConfigError: the model cannot be served as it is configured.
        """
        begin_actor()
        locate = locator(adapter_cache, serve.get_replica_context().app_name)
        self._engine = engine = await asyncio.to_thread(_build, config, locate)
        dial = partial(ChannelDialer, channel) if channel.transport == "tcp" else None
        self._server = ReplicaServer(
            engine,
            dial,
            max_step_s=MAX_STEP_S_BY_DEVICE[engine.config.device],
            orphans=OrphanRecorder() if has_accounts else None,
            name=ReplicaName(config.name, serve.get_replica_context().replica_id.unique_id),
        )
        self._metrics = EngineMetrics(config.name, serve.get_replica_context().replica_tag)

    async def generate(self, call: GenerationCall) -> GenerationResult:
        """Serve one call whose tokens go to `call.reply_to`."""
        return await self._server.generate(call)

    async def generate_stream(self, call: GenerationCall) -> AsyncIterator[Emission | GenerationResult]:
        """Serve one call whose tokens come back by the handle."""
        async for item in self._server.generate_stream(call):
            yield item

    async def pool(self, call: GenerationCall) -> GenerationResult:
        """Serve one call for a vector, which comes with the result."""
        return await self._server.pool(call)

    async def watch(self, address: TokenAddress) -> None:
        """Tell a gateway from now on how this replica is."""
        await self._server.watch(address)

    async def trouble(self) -> str | None:
        """Say in one sentence why this replica cannot be relied on, or None."""
        return self._server.trouble()

    async def adapter_places(self) -> tuple[str, dict[AdapterDigest, str]]:
        """Return the replica's id, and where adapters lie on it."""
        return serve.get_replica_context().replica_tag, self._server.adapter_places()

    async def release_adapter(self, digest: AdapterDigest) -> int:
        """Wait for the generations that use an adapter, forget it, and return the bytes that this freed."""
        freed: int = await self._server.release_adapter(digest)
        return freed

    async def traces(self, request_ids: Sequence[RequestId]) -> dict[RequestId, RequestTrace]:
        """Return what became of requests that ended here not long ago."""
        return self._engine.traces(request_ids)

    async def metric_families(self) -> dict[str, FamilyText]:
        """Return the engine's numbers."""
        return write(self._metrics.families(self._engine.snapshot(drain_ended=True)))

    def check_health(self) -> None:
        """Tell Serve whether the engine makes progress.

        Raises:
            EngineError: it does not; Serve replaces the replica.
        """
        trouble = self._server.trouble()
        if trouble is not None:
            raise EngineError(trouble)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what an autoscaling policy may look at besides ongoing requests."""
        snapshot = self._engine.snapshot()
        return {
            "num_running": float(snapshot.num_running),
            "num_waiting": float(snapshot.num_waiting),
            "kv_usage": snapshot.kv_usage,
        }

    async def __del__(self) -> None:
        if hasattr(self, "_server"):
            await self._server.stop()


def _build(config: ModelConfig, locate: Locator) -> Engine:
    # torch is imported where an engine runs, and nowhere else.
    from engine.build import build_engine

    return build_engine(config.engine, config.adapters, locate=locate)
