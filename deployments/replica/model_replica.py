"""The actor that hosts one engine: its life cycle, and what Serve and gateways query about the engine itself."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from ray import serve

from adapters.identity import AdapterDigest
from deployments.accounts.orphans import OrphanRecorder, send_to
from deployments.actor_process import begin_actor, end_process, settle
from deployments.channel.token_channel import ChannelDialer
from deployments.config import ACCOUNTS, AdapterCacheConfig, ChannelConfig, ModelConfig
from deployments.exposition import FamilyText, write
from deployments.handle_calls import connected_handle
from deployments.metrics import EngineMetrics, lora_requests
from deployments.replica.adapter_files import Locator, locator
from deployments.replica.replica_server import ReplicaServer
from deployments.routing.reporter import ReplicaName
from engine.request import RequestId
from engine.trace import RequestTrace

if TYPE_CHECKING:
    from engine.engine import Engine


class ModelReplica(ReplicaServer):
    """One replica of one base model and all its adapters; the deployment is named `Model-<name>`."""

    async def __init__(  # type: ignore[misc]
        self,
        config: ModelConfig,
        channel: ChannelConfig,
        *,
        has_accounts: bool = False,
        adapter_cache: AdapterCacheConfig | None = None,
    ) -> None:
        """Load the model off the event loop and start the engine. Serve awaits this constructor.

        Args:
            has_accounts: whether the application has an `Accounts` deployment to record usage for dead gateways.
            adapter_cache: None if there is no registry to fetch adapter files from.

        Raises:
            CheckpointError, ConfigError: the model cannot be served as configured.
        """
        begin_actor()
        locate = locator(adapter_cache)
        engine = await asyncio.to_thread(_build, config, locate)
        super().__init__(
            engine,
            ReplicaName(config.name, serve.get_replica_context().replica_id.unique_id),
            partial(ChannelDialer, channel),
            tokenizer_digest=config.tokenizer_digest,
            orphans=OrphanRecorder(partial(send_to, connected_handle(ACCOUNTS))) if has_accounts else None,
            # Until it is replaced, it would refuse all calls at once, and look idle to those who choose replicas.
            on_failure=end_process,
        )
        self._metrics = EngineMetrics(config.name, serve.get_replica_context().replica_tag)
        settle()

    async def adapter_places(self) -> tuple[str, dict[AdapterDigest, str]]:
        """Return the replica's id, and where each adapter resides on it."""
        return serve.get_replica_context().replica_tag, dict(self._engine.adapters.places())

    async def traces(self, request_ids: Sequence[RequestId]) -> dict[RequestId, RequestTrace]:
        """Return the traces of requests that ended here recently."""
        return self._engine.traces(request_ids)

    async def metric_families(self) -> dict[str, FamilyText]:
        """Return the engine's metrics in exposition format."""
        config = self._engine.config
        in_use = lora_requests(*self.adapters_in_use(), config.max_device_adapters or config.max_num_seqs)
        return write(self._metrics.families(self._engine.snapshot(drain_ended=True), in_use))

    async def __del__(self) -> None:
        if hasattr(self, "_thread"):
            await self.stop()


def _build(config: ModelConfig, locate: Locator) -> Engine:
    # Imported here so that only processes that run an engine import torch.
    from engine.build import build_engine

    return build_engine(config.engine, config.adapters, locate=locate, warms_up=True)
