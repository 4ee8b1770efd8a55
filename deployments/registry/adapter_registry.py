"""The one actor that says what names of adapters stand for. It validates before anything is served, and remembers.

    register --(files: copied or fetched into the store's folder, by digest)--> a version --> every gateway

Gateways and replicas hold nothing of their own: a gateway asks for the catalogue, and a request carries its adapter's
reference to whichever replica it reaches. What was registered outlives all processes (`adapters.store`). Drop-in
folders are watched: a new sub-folder is registered, changed files are a new version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
import time
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from ray import serve

from adapters.catalogue import AdapterEntry, Catalogue
from adapters.errors import AdapterError
from adapters.file_store import FileStore, copy_from
from adapters.folder import CONFIG_FILE, TENSOR_FILE, read_part
from adapters.identity import AdapterRef, adapter_digest
from adapters.registry import check_name, permitted_folder, signatures
from adapters.sources import AdapterSources, SourceError
from adapters.store import AdapterStore, StoreTakenError
from deployments.actor_process import begin_actor
from deployments.config import GATEWAY, AdapterBase, RegistryConfig, model_deployment
from deployments.disk_trouble import unavailable_on
from deployments.errors import UnavailableError, unknown_model
from deployments.handles import release_adapter, tell_gateways
from deployments.registry.adapter_changes import Registration
from engine.errors import OverloadError, RequestError

_logger = logging.getLogger(__name__)

T = TypeVar("T")

LOCK_POLL_S = 0.2
NUM_LOCK_TRIES = 25
NUM_FETCHERS = 4
MAX_REGISTERING = 256
"""Registrations under way at once; more are told to come back."""
RETRY_AFTER_S = 5.0


class RegistryServer:
    """The registry; a plain class, the actor is its shell. Changes run one at a time, in a thread.

    Args:
        files: where those of registered adapters are copied to.
        sources: where else than in folders adapters may come from.
        cross_encoders: names that no adapter may have, like those of `bases`.
    """

    def __init__(
        self,
        store: AdapterStore,
        bases: Sequence[AdapterBase],
        *,
        files: FileStore,
        sources: AdapterSources,
        cross_encoders: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._bases = {base.name: base for base in bases}
        self._taken = dict.fromkeys(cross_encoders, "a cross-encoder") | dict.fromkeys(self._bases, "a base model")
        self._files = files
        self._sources = sources
        self._num_registering = 0
        # Threads of their own: a slow source holds up nothing but other sources.
        self._fetchers = ThreadPoolExecutor(max_workers=NUM_FETCHERS, thread_name_prefix="adapter-fetch")
        self._lock = asyncio.Lock()
        self._seen_by_base: dict[str, dict[str, tuple[int, ...]]] = {}
        """Signature of each sub-folder's files at the last look at a drop-in folder."""
        self._unread: set[str] = set()
        """Bases whose drop-in folder could not be read at the last look."""
        self._displaced: list[tuple[str, AdapterRef]] = []

    @property
    def catalogue(self) -> Catalogue:
        """All names as they stand."""
        return self._store.catalogue()

    async def declare(self, refs_by_base: Mapping[str, Sequence[AdapterRef]]) -> None:
        """Take over the adapters that the configuration names; those that are known already stay as they are.

        What an earlier configuration named and this one does not is forgotten: its files may be anything by now.
        """
        declared = {(ref.name, ref.digest) for refs in refs_by_base.values() for ref in refs}
        async with self._lock:
            for entry in self.catalogue.entries.values():
                for version in entry.versions:
                    if not self._files.has(version.ref) and (entry.name, version.ref.digest) not in declared:
                        await asyncio.to_thread(self._store.remove, entry.name, version.number)
            for name in self.catalogue.entries.keys() & self._taken.keys():
                _logger.warning("the adapter %r was loaded earlier; %s has its name now", name, self._taken[name])
            for base, ref in ((base, ref) for base, refs in refs_by_base.items() for ref in refs):
                known = self.catalogue.entries.get(ref.name)
                if known is not None and any(version.ref.digest == ref.digest for version in known.versions):
                    continue
                await self._add(ref, base)

    async def register(self, wanted: Registration) -> Catalogue:
        """Make the content of a folder or a URL the newest version of a name, with all of the name's traffic.

        Raises:
            RequestError: the place may not be used, holds no adapter that fits, or the name is taken.
            UnavailableError: the source does not answer, or our disk is full; also below.
            OverloadError: too many others are being registered.
        """
        base = self._base(wanted.base)
        if self._num_registering >= MAX_REGISTERING:
            raise OverloadError("Too many adapters are being loaded.", retry_after_s=RETRY_AFTER_S)
        self._num_registering += 1
        try:
            with _refusing("lora_name"):
                return await self._register(wanted, base)
        except SourceError as error:
            raise UnavailableError(str(error), retry_after_s=RETRY_AFTER_S) from error
        finally:
            self._num_registering -= 1

    async def _register(self, wanted: Registration, base: AdapterBase) -> Catalogue:
        self._check_name(wanted)
        with _refusing("lora_path"):
            incoming = await self._bring(wanted, base)
        try:
            async with self._lock:
                # Again: others have been at it meanwhile.
                self._check_name(wanted)
                with _refusing("lora_path"):
                    ref = await asyncio.to_thread(
                        self._files.keep, wanted.name, incoming, base.module_shapes, base.max_rank
                    )
                try:
                    await self._add(ref, base.name, takes_traffic=wanted.takes_traffic)
                finally:
                    await self._delete_unused((ref,))
                return self.catalogue
        finally:
            await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)

    async def route(self, name: str, split: Mapping[int, int]) -> Catalogue:
        """Split a name's traffic among its versions, by percentages.

        Raises:
            RequestError: there is no such name or version, it is lost, or they do not make 100.
        """
        async with self._lock:
            entry = self.catalogue.entries.get(name)
            if entry is None:
                raise unknown_model(name, field="name")
            with _refusing("split"):
                await asyncio.to_thread(self._check_not_lost, entry, split)
                await asyncio.to_thread(self._store.route, name, dict(split))
        return self.catalogue

    async def unregister(self, name: str, number: int | None = None) -> tuple[Catalogue, tuple[AdapterRef, ...]]:
        """Forget a name or a version of it; return also the contents that no name stands for any more.

        Raises:
            RequestError: there is no such name or version.
        """
        async with self._lock:
            before = self.catalogue
            with _refusing("lora_name", code="model_not_found"):
                await asyncio.to_thread(self._store.remove, name, number)
            return self.catalogue, self.catalogue.gone(name, before)

    def take_displaced(self) -> list[tuple[str, AdapterRef]]:
        """Return contents, each with its base, that made room for new versions; they are the caller's to free."""
        displaced, self._displaced = self._displaced, []
        return displaced

    async def discard(self, refs: Sequence[AdapterRef]) -> None:
        """Delete the copies of contents that nobody uses any more, those left out that were registered again."""
        async with self._lock:
            await self._delete_unused(refs)

    async def read_file(self, ref: AdapterRef, file: str, offset: int) -> bytes:
        """Return a part of a file of a registered content, for a node that does not have it.

        Raises:
            AdapterError: no name stands for the content, or it cannot be read.
        """
        versions = (version for entry in self.catalogue.entries.values() for version in entry.versions)
        path = next((version.ref.path for version in versions if version.ref.digest == ref.digest), None)
        if path is None or file not in (CONFIG_FILE, TENSOR_FILE):
            raise AdapterError(ref.name, "it is not loaded any more")
        return await asyncio.to_thread(read_part, ref.name, path, file, offset)

    async def look(self) -> bool:
        """Look at the drop-in folders; register what is new or changed, and say whether anything was."""
        revision = self.catalogue.revision
        for base in self._bases.values():
            if base.watched is None:
                continue
            try:
                await self._look_into(base.watched, base)
                self._unread.discard(base.name)
            except (AdapterError, OSError) as error:
                # Others are looked at all the same, and it is told of once.
                if base.name not in self._unread:
                    _logger.warning("drop-in folder: %s", error)
                self._unread.add(base.name)
        return self.catalogue.revision != revision

    async def _look_into(self, root: str, base: AdapterBase) -> None:
        found = await asyncio.to_thread(signatures, root)
        is_first = base.name not in self._seen_by_base
        seen = self._seen_by_base.get(base.name, {})
        changed = [name for name, signature in found.items() if seen.get(name) != signature]
        self._seen_by_base[base.name] = found
        for name in changed:
            entry = self.catalogue.entries.get(name)
            if is_first and entry is not None:
                continue  # the configuration has told of it already
            try:
                place = os.path.join(root, name)
                await self.register(Registration(name=name, place=place, base=base.name, replaces=True))
            except OverloadError:
                found.pop(name)
            except RequestError as error:
                # It may be on its way still; the next change of its files is another chance.
                _logger.warning("drop-in folder: %s", error.message)

    async def _bring(self, wanted: Registration, base: AdapterBase) -> str:
        """Return a folder of the store with the files that are meant.

        Raises:
            AdapterError: there is no such place, it may not be used, or lacks them.
            SourceError: as `AdapterSources.fetch`.
        """
        name, place = wanted.name, wanted.place
        path = None if "://" in place else permitted_folder(place, base.roots)
        if path is not None:
            return await asyncio.to_thread(self._files.bring, name, copy_from(name, path))
        if "://" not in place and not self._sources.may_be_hub_id(place):
            raise AdapterError(name, "there is no such folder among those that adapters may be loaded from")
        fill = partial(self._sources.fetch, name, self._sources.url_of(name, place))
        return await asyncio.get_running_loop().run_in_executor(self._fetchers, self._files.bring, name, fill)

    def _check_name(self, wanted: Registration) -> None:
        check_name(wanted.name)
        if wanted.name in self._taken:
            raise AdapterError(wanted.name, f"{self._taken[wanted.name]} has this name")
        entry = self.catalogue.entries.get(wanted.name)
        if entry is not None and entry.split and not wanted.replaces:
            raise AdapterError(wanted.name, "it is loaded already; 'load_inplace' makes another version of it")

    def _check_not_lost(self, entry: AdapterEntry, numbers: Collection[int]) -> None:
        """Refuse versions whose files are not ours and have become others: no replica could read them any more."""
        for version in entry.versions:
            ref = version.ref
            if (
                version.number in numbers
                and not self._files.has(ref)
                and adapter_digest(ref.path, ref.name) != ref.digest
            ):
                raise AdapterError(ref.name, f"the files of its version {version.number} have been overwritten")

    async def _delete_unused(self, refs: Sequence[AdapterRef]) -> None:
        """Delete the files of contents that no name stands for; the lock is held."""
        used = self.catalogue.digests()
        for ref in refs:
            if ref.digest not in used:
                await asyncio.to_thread(self._files.delete, ref)

    def _base(self, name: str | None) -> AdapterBase:
        if name is None and len(self._bases) == 1:
            return next(iter(self._bases.values()))
        if name is None:
            names = ", ".join(self._bases)
            raise RequestError(f"'base_model_name' must be one of: {names}.", field="base_model_name")
        if name not in self._bases:
            raise unknown_model(name, field="base_model_name")
        return self._bases[name]

    async def _add(self, ref: AdapterRef, base: str, *, takes_traffic: bool = True) -> None:
        before = self.catalogue
        await asyncio.to_thread(self._store.add, ref, base, takes_traffic=takes_traffic)
        gone = self.catalogue.gone(ref.name, before)
        self._displaced += [(base, ref) for ref in gone]
        if gone:
            _logger.info("%d old versions of the adapter %r make room for a new one", len(gone), ref.name)


class Registry:
    """The actor: a shell around `RegistryServer` that also looks at the drop-in folders.

    A change that has begun is carried through, even where whoever asked for it has gone.
    """

    async def __init__(self, config: RegistryConfig) -> None:  # type: ignore[misc]
        """Open the store, take over what the configuration names, and begin to look; Serve awaits it."""
        begin_actor()
        files = FileStore(config.folder)
        store = await asyncio.to_thread(_open_store, config, files)
        sources = AdapterSources(config.sources, max_bytes=config.max_source_bytes, timeout_s=config.source_timeout_s)
        self._server = RegistryServer(
            store, config.bases, files=files, sources=sources, cross_encoders=config.cross_encoders
        )
        self._changes: set[asyncio.Task[Any]] = set()
        await self._server.declare(config.declared_by_base)
        self._watch = asyncio.create_task(self._look_for_ever(config.watch_period_s))

    async def catalogue(self, store: str, revision: int) -> Catalogue | None:
        """Return all names, or None where the caller knows them as they stand."""
        found = self._server.catalogue
        return None if (found.store, found.revision) == (store, revision) else found

    async def register(self, wanted: Registration) -> Catalogue:
        """Make the content of a folder or a URL the newest version of a name."""
        return await self._whole(self._server.register(wanted))

    async def route(self, name: str, split: dict[int, int]) -> Catalogue:
        """Split a name's traffic among its versions."""
        return await self._whole(self._server.route(name, split))

    async def unregister(self, name: str, number: int | None = None) -> tuple[Catalogue, tuple[AdapterRef, ...]]:
        """Forget a name or a version of it."""
        return await self._whole(self._server.unregister(name, number))

    async def discard(self, refs: tuple[AdapterRef, ...]) -> None:
        """Delete the copies of contents that nobody uses any more."""
        await self._whole(self._server.discard(refs))

    async def read_file(self, ref: AdapterRef, file: str, offset: int) -> bytes:
        """Return a part of a file of a registered content, for a node that does not have it."""
        return await self._server.read_file(ref, file, offset)

    async def _whole(self, change: Coroutine[Any, Any, T]) -> T:
        return await asyncio.shield(self._start(change))

    def _start(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(change)
        # The event loop keeps no reference to a task, and this one may outlive the call.
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return task

    async def _free(self, displaced: Sequence[tuple[str, AdapterRef]]) -> None:
        """Do what an unload does, for versions that made room; no load waits for the requests that use them."""
        await self._tell()
        for base, ref in displaced:
            handle = serve.get_deployment_handle(model_deployment(base), serve.get_replica_context().app_name)
            await release_adapter(handle, ref.digest)
        await self._server.discard([ref for _, ref in displaced])

    async def _tell(self) -> None:
        """Tell the gateways at once; one that is not reached asks by itself."""
        gateways = serve.get_deployment_handle(GATEWAY, serve.get_replica_context().app_name)
        await tell_gateways(gateways, self._server.catalogue)

    async def _look_for_ever(self, period_s: float) -> None:
        while True:
            try:
                displaced = self._server.take_displaced()
                if displaced:
                    self._start(self._free(displaced))
                if await self._server.look():
                    await self._tell()
            except Exception:
                # The task's border: a folder that cannot be read today may be tomorrow.
                _logger.exception("looking at the drop-in folders failed")
            await asyncio.sleep(period_s)


def _open_store(config: RegistryConfig, files: FileStore) -> AdapterStore:
    """Open the store, which one registry at a time may have; without it names last as long as this process."""
    path = config.store_path
    for _ in range(NUM_LOCK_TRIES):
        try:
            store = AdapterStore(path, max_versions=config.max_versions)
        except StoreTakenError:
            time.sleep(LOCK_POLL_S)
        else:
            files.clear()
            return store
    _logger.warning("%s is another server's: adapters loaded here are forgotten as this one ends", path)
    return AdapterStore(":memory:", max_versions=config.max_versions)


@contextmanager
def _refusing(field: str, *, code: str | None = None) -> Iterator[None]:
    """Tell what is wrong with an adapter as what is wrong with a field of the request."""
    try:
        with unavailable_on(OSError, sqlite3.OperationalError):
            yield
    except AdapterError as error:
        raise RequestError(str(error), field=field, code=code) from error
