"""The registry actor: wraps `RegistryServer`, watches folders, notifies gateways, and frees unloaded adapters.

    unload --> forgotten --> every gateway told, its requests ended --> every replica's memory freed --> files deleted

The actor runs all of these steps itself, so they complete even if the caller goes away. If this process dies halfway,
the next one frees what is left.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from itertools import count

from ray import serve
from ray.serve.handle import DeploymentHandle

from adapters.catalogue import AdapterEntry, Catalogue, CatalogueChange
from adapters.file_store import FileStore
from adapters.identity import AdapterDigest, AdapterRef
from adapters.sources import AdapterSources
from adapters.store import AdapterStore, StoreTakenError
from deployments.actor_process import begin_actor
from deployments.config import GATEWAY, RegistryConfig, model_deployment
from deployments.handle_calls import TELL_TIMEOUT_S, ask_all
from deployments.registry.adapter_changes import Registration
from deployments.registry.adapter_registry import Displaced, RegistryServer
from deployments.registry.followers import Followers
from deployments.registry.misfits import misfits
from deployments.waits import detached, for_ever
from engine.errors import ConfigError

_logger = logging.getLogger(__name__)

LOCK_POLL_S = 0.2
NUM_LOCK_TRIES, NUM_LOCK_TRIES_IN_ROLLOUT = 25, 300
"""How often a registry tries to lock a store that another server, or another build of its own, has. In a rollout it
starts while its predecessor finishes what it has begun, for which Serve gives that 20 s."""
CONFIRM_POLL_S = 0.02
RELEASE_TIMEOUT_S = 600.0
MAX_RELEASING = 256
"""How many contents are released at once. Gateways and replicas take a few hundred calls at a time, which requests need
too, and a drop-in folder of thousands may have been emptied."""


class Registry:
    """The deployment `Registry`, which has a single replica.

    A change that has begun completes even if its caller has gone, and every gateway is notified before it is
    acknowledged.
    """

    async def __init__(self, config: RegistryConfig) -> None:  # type: ignore[misc]
        """Open the store, register the declared adapters, and start watching drop-in folders. Awaited by Serve.

        Raises:
            ConfigError: the store is damaged, or its disk is full.
        """
        begin_actor()
        self._store, files = await asyncio.to_thread(open_store, config)
        sources = AdapterSources(config.sources, max_bytes=config.max_source_bytes, timeout_s=config.source_timeout_s)
        self._server = RegistryServer(
            self._store,
            config.bases,
            files=files,
            sources=sources,
            cross_encoders=config.cross_encoders,
            seen_by_base=config.seen_by_base,
        )
        self._handles: dict[str, DeploymentHandle] = {}
        self._followers = Followers()
        self._telling, self._retrying = asyncio.Lock(), asyncio.Lock()
        self._releasing = asyncio.Semaphore(MAX_RELEASING)
        self._told: Catalogue | None = None
        self._given_by_gateway: dict[str, int] = {}
        try:
            await self._server.declare(config.declared_by_base, config.build)
        except sqlite3.Error as error:
            reason = f"args.registry.folder: {config.store_path} cannot be written: {error}"
            raise ConfigError(reason) from error
        self._misfits: dict[str, dict[AdapterDigest, str]] = {}
        pause = partial(asyncio.sleep, config.watch_period_s)
        self._watch = asyncio.create_task(for_ever(self._look, pause, "scanning the drop-in folders failed"))
        self._fit_check = asyncio.create_task(self._find_misfits(config))

    async def catalogue(
        self, gateway: str, store: str, revision: int, in_use: frozenset[AdapterDigest] = frozenset()
    ) -> Catalogue | CatalogueChange | None:
        """Return what the gateway's copy of the catalogue, of this revision, lacks; None if it is current.

        Args:
            in_use: the adapters of the gateway's running answers.
        """
        self._followers.confirm(gateway, store, revision, in_use)
        found = self._store.since(store, revision)
        if not isinstance(found, CatalogueChange):
            self._given_by_gateway.pop(gateway, None)
        elif self._given_by_gateway.get(gateway) == revision:
            # It could not use the change that it got, as a gateway of another release.
            return self._server.catalogue
        else:
            self._given_by_gateway[gateway] = revision
        return found

    async def register(self, wanted: Registration) -> AdapterEntry:
        """Make the content of a folder or a URL the newest version of a name; return the name's entry."""
        return await asyncio.shield(detached(self._and_tell(self._server.register(wanted), wanted.name)))

    async def route(self, name: str, split: dict[int, int]) -> AdapterEntry:
        """Split a name's traffic among its versions; return its entry."""
        return await asyncio.shield(detached(self._and_tell(self._server.route(name, split), name)))

    async def admit(self, wanted: Registration, number: int) -> AdapterEntry:
        """Route traffic to a version that has passed its trial; return the name's entry."""
        return await asyncio.shield(detached(self._and_tell(self._server.admit(wanted, number), wanted.name)))

    async def withdraw(self, name: str, number: int) -> None:
        """Unload a version that has failed its trial, unless somebody needs it."""
        await asyncio.shield(detached(self._withdraw(name, number)))

    async def unload(self, name: str, number: int | None = None) -> list[int]:
        """Remove a name or one of its versions, wait for the requests that use it, and free it everywhere.

        Returns the bytes freed on each replica.
        """
        return await asyncio.shield(detached(self._unload(name, number)))

    async def misfits(self) -> dict[str, dict[AdapterDigest, str]]:
        """Return, for each base model, the contents that cannot be served with it, and why.

        They were found at the start, and have not been loaded again since.
        """
        return {
            base: {digest: why for digest, why in found.items() if not self._server.has_registered(base, digest)}
            for base, found in self._misfits.items()
        }

    async def read_file(self, ref: AdapterRef, file: str, offset: int) -> bytes:
        """Return a part of a file of a registered content, for a node that does not have it."""
        return await self._server.read_file(ref, file, offset)

    def __del__(self) -> None:
        """Stop watching. Called by Serve, which then shuts down the threads that reading the folders needs."""
        for name in ("_watch", "_fit_check"):
            # The constructor may have failed before.
            if (task := getattr(self, name, None)) is not None:
                task.cancel()

    async def _and_tell(self, change: Awaitable[Catalogue], name: str) -> AdapterEntry:
        catalogue = await change
        await self._tell()
        await self._retry_repaired()
        return catalogue.entries[name]

    async def _unload(self, name: str, number: int | None) -> list[int]:
        return await self._free(await self._server.unregister(name, number))

    async def _withdraw(self, name: str, number: int) -> None:
        await self._free(await self._server.withdraw(name, number))

    async def _free(self, displaced: Sequence[Displaced]) -> list[int]:
        """Wait for requests that use the contents, then delete them everywhere; return the bytes freed on replicas."""
        await self._tell()
        freed = await asyncio.gather(*(self._release_in_turn(base, ref) for base, ref in displaced))
        await self._server.discard([ref for _, ref in displaced])
        return [num_bytes for answers in freed for num_bytes in answers]

    async def _release_in_turn(self, base: str, ref: AdapterRef) -> list[int]:
        async with self._releasing:
            return await self._release(base, ref)

    async def _release(self, base: str, ref: AdapterRef) -> list[int]:
        try:
            replicas = self._handle(model_deployment(base))
        except KeyError:
            # The base model is not in the configuration any more.
            return []
        # A request may have reached no replica yet, or be between two of them: its gateway knows that it has not ended.
        asked = await ask_all(self._handle(GATEWAY), "until_unused", ref.digest, timeout_s=RELEASE_TIMEOUT_S)
        # A gateway that is draining is not in the handle. If the content has been loaded again meanwhile, its answers
        # may never end, and what they need is not deleted.
        while self._followers.use(ref.digest, but=asked) and ref.digest not in self._server.catalogue.digests():
            await asyncio.sleep(CONFIRM_POLL_S)
        return await ask_all(replicas, "release_adapter", ref.digest, timeout_s=RELEASE_TIMEOUT_S)

    async def _retry_repaired(self) -> None:
        """Have replicas forget that they could not load what has been repaired, before a load is acknowledged."""
        # With the lock, whose repair another call has taken waits for it, too.
        async with self._retrying:
            await asyncio.gather(*(self._retry(base, digest) for base, digest in self._server.take_repaired()))

    async def _retry(self, base: str, digest: AdapterDigest) -> None:
        # A base model that is not in the configuration any more has no replicas.
        with suppress(KeyError):
            await ask_all(self._handle(model_deployment(base)), "retry_adapter", digest, timeout_s=TELL_TIMEOUT_S)

    async def _tell(self) -> None:
        """Send the gateways what has changed since they were told last, and wait until each has it.

        A gateway that cannot be reached gets it by polling. Changes made during a notification share the next one.
        """
        wanted = self._server.catalogue
        async with self._telling:
            if self._told is not None and self._told.revision >= wanted.revision:
                return
            told = self._server.catalogue
            change = self._store.since(told.store, -1 if self._told is None else self._told.revision)
            for gateway in await ask_all(self._handle(GATEWAY), "adopt", change, timeout_s=TELL_TIMEOUT_S):
                self._followers.confirm(gateway, told.store, told.revision)
            while not self._followers.have(told):
                await asyncio.sleep(CONFIRM_POLL_S)
            self._told = told

    def _handle(self, deployment: str) -> DeploymentHandle:
        if deployment not in self._handles:
            app_name = serve.get_replica_context().app_name
            self._handles[deployment] = serve.get_deployment_handle(deployment, app_name)
        return self._handles[deployment]

    async def _find_misfits(self, config: RegistryConfig) -> None:
        # Beside what the registry does: of thousands of adapters, it takes seconds.
        declared = {ref.digest for refs in config.declared_by_base.values() for ref in refs}
        catalogue = self._server.catalogue
        self._misfits = await asyncio.to_thread(misfits, catalogue, config.bases, known_to_fit=declared)
        for base, reason_by_digest in (await self.misfits()).items():
            for digest, reason in reason_by_digest.items():
                _logger.warning("adapter %s was loaded earlier and cannot be served with %s: %s", digest, base, reason)

    async def _look(self) -> None:
        displaced = self._server.take_displaced()
        if displaced:
            detached(self._free(displaced))
        if await self._server.look():
            await self._tell()
        await self._retry_repaired()


def open_store(config: RegistryConfig) -> tuple[AdapterStore, FileStore]:
    """Open the store, which only one registry may hold; if another server holds it, names last only for this process.

    The files then go to a temporary folder, as the other registry would delete those it does not know. A predecessor of
    the same build is waited for however long it takes to end: gateways know the names meanwhile.

    Raises:
        ConfigError: the store is damaged, or its disk is full.
    """
    path = config.store_path
    for attempt in count(1):
        try:
            store = AdapterStore(path, holder=config.server, max_versions=config.max_versions)
        except StoreTakenError as taken:
            is_predecessor = config.build != "" and taken.build == config.build
            is_of_server = config.server != "" and taken.holder == config.server
            if attempt >= (NUM_LOCK_TRIES_IN_ROLLOUT if is_of_server else NUM_LOCK_TRIES) and not is_predecessor:
                break
            time.sleep(LOCK_POLL_S)
        except sqlite3.Error as error:
            raise ConfigError(f"args.registry.folder: {path} cannot be opened: {error}") from error
        else:
            files = FileStore(config.folder)
            files.clear()
            return store, files
    _logger.warning("%s is in use by another server: adapters loaded here are lost when this one stops", path)
    return AdapterStore(":memory:", max_versions=config.max_versions), FileStore(tempfile.mkdtemp(prefix="adapters-"))
