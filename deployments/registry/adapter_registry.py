"""The single authority on adapter names. It validates adapters before they are served and persists the catalogue.

    register --(files: copied or fetched into the store's folder, by digest)--> a version --> every gateway

Gateways and replicas keep no state of their own: a gateway polls the catalogue, and a request carries its adapter's
reference to whichever replica it reaches. Registrations outlive all processes (`adapters.store`). Drop-in folders are
watched: a new sub-folder is registered, and changed files make a new version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sqlite3
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from adapters.catalogue import AdapterEntry, Catalogue, names_taken
from adapters.errors import AdapterError, AdapterUnavailableError
from adapters.file_store import FileStore, copy_files
from adapters.folder import CONFIG_FILE, TENSOR_FILE, read_part
from adapters.identity import AdapterDigest, AdapterRef, adapter_digest
from adapters.registry import Signature, check_name, permitted_folder, reference_in
from adapters.sources import AdapterSources, SourceError
from adapters.store import AdapterStore
from adapters.tokenizer_files import check_tokenizer
from deployments.config import AdapterBase
from deployments.errors import UnavailableError, unavailable_on, unknown_model
from deployments.registry.adapter_changes import Registration
from deployments.registry.drop_ins import DropIns
from deployments.registry.take_over import take_over
from deployments.registry.trials import Trials
from engine.errors import OverloadError, RequestError

_logger = logging.getLogger(__name__)

NUM_FETCHERS, NUM_COPIERS = 4, 8
MAX_REGISTERING = 256
"""Maximum concurrent registrations; further ones are refused with a retry time."""
RETRY_AFTER_S = 5.0


class Displaced(NamedTuple):
    """A content that no name refers to any more, and a base model whose replicas may hold it."""

    base: str
    ref: AdapterRef


class Repaired(NamedTuple):
    """A content whose files are whole again, and a base model whose replicas may have failed to load it."""

    base: str
    digest: AdapterDigest


class RegistryServer:
    """The registry as a plain class, which the actor wraps. Changes run one at a time, in a thread.

    Args:
        files: the store that adapters' files are copied to.
        sources: permitted sources other than folders.
        cross_encoders: names reserved like those of `bases`.
        seen_by_base: the contents of the drop-in folders when the configuration was read.
    """

    def __init__(
        self,
        store: AdapterStore,
        bases: Sequence[AdapterBase],
        *,
        files: FileStore,
        sources: AdapterSources,
        cross_encoders: Sequence[str] = (),
        seen_by_base: Mapping[str, Mapping[str, Signature]] | None = None,
    ) -> None:
        self._store = store
        self._bases = {base.name: base for base in bases}
        self._taken = names_taken(self._bases, cross_encoders)
        self._files = files
        self._sources = sources
        self._num_registering = 0
        self._registered: set[tuple[str, AdapterDigest]] = set()
        self._trials = Trials(store)
        # Separate pools: a slow source delays only other sources, and a slow folder only other folders.
        self._fetchers = ThreadPoolExecutor(max_workers=NUM_FETCHERS, thread_name_prefix="adapter-fetch")
        self._copiers = ThreadPoolExecutor(max_workers=NUM_COPIERS, thread_name_prefix="adapter-copy")
        self._lock = asyncio.Lock()
        self._read_by_base = seen_by_base or {}
        self._drop_ins = DropIns(bases, self._take_in)
        # Left by a process that ended before it freed them.
        orphans = files.unused(self.catalogue.digests())
        self._displaced = [Displaced(base, ref) for ref in orphans for base in self._bases]
        self._repaired: list[Repaired] = []

    @property
    def catalogue(self) -> Catalogue:
        """The current catalogue."""
        return self._store.catalogue()

    def has_registered(self, base: str, digest: AdapterDigest) -> bool:
        """Whether this process has checked that a content fits a base model, and stored it."""
        return (base, digest) in self._registered

    async def declare(self, refs_by_base: Mapping[str, Sequence[AdapterRef]], build: str) -> None:
        """Register the adapters that a configuration declares, once for each build of the application.

        After a restart of the registry its configuration is stale: names may have been unloaded since, and folders
        changed. Versions that this configuration does not declare are kept only if their files are in the store, as
        files elsewhere may have changed, or if one without traffic would have to answer for them.
        """
        async with self._lock:
            if self._store.build != build:
                await self._take_over(refs_by_base, build)
            self._drop_ins.know(await asyncio.to_thread(self._store.signatures))

    async def _take_over(self, refs_by_base: Mapping[str, Sequence[AdapterRef]], build: str) -> None:
        for name in self.catalogue.entries.keys() & self._taken.keys():
            _logger.warning("the adapter %r was loaded earlier; %s has its name now", name, self._taken[name])
        before = self.catalogue
        await asyncio.to_thread(take_over, self._store, self._files, refs_by_base)
        told = [
            (ref.name, ref.digest, self._read_by_base.get(base, {}).get(ref.name, ""))
            for base, refs in refs_by_base.items()
            for ref in refs
        ]
        await asyncio.to_thread(self._store.tell, told, build)
        used = self.catalogue.digests()
        versions = ((entry.base, version.ref) for entry in before.entries.values() for version in entry.versions)
        self._displaced += [Displaced(base, ref) for base, ref in versions if ref.digest not in used]

    async def register(self, wanted: Registration) -> Catalogue:
        """Make the content of a folder or a URL the newest version of a name, with the wanted share of its traffic.

        Raises:
            RequestError: the place is not permitted or holds no suitable adapter, or the name is taken.
            UnavailableError: the source does not answer, or the disk is full or files cannot be opened (also raised by
                the methods below).
            OverloadError: too many other registrations are under way.
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
                # Check again: other changes may have happened meanwhile.
                self._check_name(wanted)
                with _refusing("lora_path"):
                    ref = await asyncio.to_thread(
                        self._files.keep, wanted.name, incoming, base.module_shapes, base.max_rank
                    )
                before = self.catalogue
                if not os.path.isdir(incoming):
                    self._repaired += [Repaired(base, ref.digest) for base in _users(before, ref)]
                percent = 0 if wanted.is_tried else wanted.percent
                try:
                    number = await asyncio.to_thread(
                        self._store.add, ref, base.name, percent=percent, served=self._bases
                    )
                    self._registered.add((base.name, ref.digest))
                    await asyncio.to_thread(self._trials.note, wanted.name, number, before, is_tried=wanted.is_tried)
                finally:
                    # Those of a model that is gone may have left their name to one that could not be added.
                    self._displace(ref.name, base.name, before)
                    await self._delete_unused((ref,))
                return self.catalogue
        finally:
            await asyncio.to_thread(shutil.rmtree, incoming, ignore_errors=True)

    async def admit(self, wanted: Registration, number: int) -> Catalogue:
        """Route the wanted share of a name's traffic to a version that has passed its trial.

        Raises:
            RequestError: the version was unloaded meanwhile, or the name loaded by somebody else.
        """
        async with self._lock:
            with _refusing("lora_name"):
                self._check_name(wanted)
                before = self.catalogue
                entry = before.entries.get(wanted.name)
                if entry is None or entry.version(number) is None:
                    raise AdapterError(wanted.name, f"its version {number} was unloaded while it was tried")
                if wanted.percent:
                    split = entry.split_with(number, wanted.percent)
                    await asyncio.to_thread(self._store.route, wanted.name, split)
                await asyncio.to_thread(self._trials.keep, wanted.name, [number])
            self._displace(wanted.name, entry.base, before)
        return self.catalogue

    async def withdraw(self, name: str, number: int) -> list[Displaced]:
        """Remove a version that has failed its trial, unless it was there before or somebody else needs it."""
        async with self._lock:
            is_unwanted = self._trials.fail(name, number)
            before = self.catalogue
            entry = before.entries.get(name)
            if not is_unwanted or entry is None or entry.version(number) is None:
                return []
            with _refusing("lora_name"):
                await asyncio.to_thread(self._store.remove, name, number)
            return [Displaced(entry.base, ref) for ref in self.catalogue.gone(name, before)]

    def _displace(self, name: str, base: str, before: Catalogue) -> None:
        """Have the contents freed that have made room for another one of their name."""
        gone = self.catalogue.gone(name, before)
        self._displaced += [Displaced(base, ref) for ref in gone]
        if gone:
            _logger.info("%d old versions of the adapter %r make room for a new one", len(gone), name)

    async def route(self, name: str, split: Mapping[int, int]) -> Catalogue:
        """Split a name's traffic among its versions by percentages.

        Raises:
            RequestError: there is no such name or version, its files are lost, or the percentages do not sum to 100.
        """
        async with self._lock:
            entry = self.catalogue.entries.get(name)
            if entry is None:
                raise unknown_model(name, field="name")
            with _refusing("split"):
                await asyncio.to_thread(self._check_not_lost, entry, split)
                before = self.catalogue
                await asyncio.to_thread(self._store.route, name, dict(split))
                await asyncio.to_thread(self._trials.keep, name, split)
            self._displace(name, entry.base, before)
        return self.catalogue

    async def unregister(self, name: str, number: int | None = None) -> list[Displaced]:
        """Remove a name or one of its versions; return the contents that no name refers to any more.

        Raises:
            RequestError: there is no such name or version, or a version that would get its traffic is lost.
        """
        async with self._lock:
            before = self.catalogue
            entry = before.entries.get(name)
            if entry is not None and number in dict(entry.split):
                with _refusing("version"):
                    await asyncio.to_thread(self._check_not_lost, entry, entry.split_without(number))
            is_version = entry is not None and number is not None
            with _refusing("version" if is_version else "lora_name", code="model_not_found"):
                await asyncio.to_thread(self._store.remove, name, number)
            base = before.entries[name].base
            return [Displaced(base, ref) for ref in self.catalogue.gone(name, before)]

    def take_displaced(self) -> list[Displaced]:
        """Return contents that were replaced or left unfreed. The caller becomes responsible for freeing them."""
        displaced, self._displaced = self._displaced, []
        return displaced

    def take_repaired(self) -> list[Repaired]:
        """Return contents that were repaired. The caller becomes responsible for telling the replicas."""
        repaired, self._repaired = self._repaired, []
        return repaired

    async def discard(self, refs: Sequence[AdapterRef]) -> None:
        """Delete the copies of contents that nobody uses any more, except any that were registered again."""
        async with self._lock:
            await self._delete_unused(refs)

    async def read_file(self, ref: AdapterRef, file: str, offset: int) -> bytes:
        """Return a part of a file of a registered content, for a node that does not have it.

        Raises:
            AdapterError: the content is neither registered nor still stored, or it cannot be read.
        """
        # Also serve unloaded content: as long as it is stored, some request may still use it.
        found = self._files.find(ref)
        if found is None:
            versions = (version for entry in self.catalogue.entries.values() for version in entry.versions)
            found = next((version.ref for version in versions if version.ref.digest == ref.digest), None)
        if found is None or file not in (CONFIG_FILE, TENSOR_FILE):
            raise AdapterError(ref.name, "it is not loaded any more")
        return await asyncio.to_thread(read_part, ref.name, found.path, file, offset)

    async def look(self) -> bool:
        """Scan the drop-in folders and register what is new or changed. Return whether the catalogue changed."""
        revision = self.catalogue.revision
        await self._drop_ins.look()
        return self.catalogue.revision != revision

    async def _take_in(self, name: str, signature: Signature, base: AdapterBase) -> None:
        """Register the content of a sub-folder with a new signature, unless only the files' times have changed."""
        assert base.watched is not None
        with _refusing("lora_path"):
            ref = await asyncio.to_thread(reference_in, base.watched, name, base.allowed, tokenizer=base.tokenizer)
        async with self._lock:
            told = await asyncio.to_thread(self._store.told, name)
        entry = self.catalogue.entries.get(name)
        versions = () if entry is None or entry.base != base.name else entry.versions
        # Unchanged content keeps the routing that was set by hand. Content put back after an unload is registered.
        if told != ref.digest or all(version.ref.digest != ref.digest for version in versions):
            place = os.path.join(base.watched, name)
            await self.register(Registration(name=name, place=place, base=base.name, replaces=True))
        async with self._lock:
            with _refusing("lora_path"):
                await asyncio.to_thread(self._store.tell, [(name, ref.digest, signature)])

    async def _bring(self, wanted: Registration, base: AdapterBase) -> str:
        """Copy or fetch the wanted files to a folder of the store and return it.

        Raises:
            AdapterError: the place does not exist, is not permitted, or lacks the files.
            SourceError: as in `AdapterSources.fetch`.
        """
        name, place, loop = wanted.name, wanted.place, asyncio.get_running_loop()
        if "://" not in place:
            incoming = await loop.run_in_executor(self._copiers, self._copied, name, place, base)
            if incoming is not None:
                return incoming
            if not self._sources.may_be_hub_id(place):
                raise AdapterError(
                    name,
                    f"'adapter_folder' of {base.name} and 'registry.allowed_folders' have no such folder, "
                    "and 'registry.sources' no such source",
                )
        fill = partial(self._sources.fetch, name, self._sources.url_of(name, place), tokenizer=base.tokenizer)
        return await loop.run_in_executor(self._fetchers, self._files.bring, fill)

    def _copied(self, name: str, place: str, base: AdapterBase) -> str | None:
        """Copy a permitted folder's files to a folder of the store and return it, or None if there is none."""
        path = permitted_folder(place, base.roots)
        if path is None:
            return None
        check_tokenizer(name, path, base.tokenizer)
        return self._files.bring(partial(copy_files, name, path))

    def _check_name(self, wanted: Registration) -> None:
        check_name(wanted.name)
        if wanted.name in self._taken:
            raise AdapterError(wanted.name, f"{self._taken[wanted.name]} has this name")
        entry = self.catalogue.entries.get(wanted.name)
        # One of a model that is not configured any more is listed nowhere, and in nobody's way.
        if entry is not None and entry.base in self._bases and entry.split and not wanted.replaces:
            raise AdapterError(wanted.name, "it is loaded already; 'load_inplace' makes another version of it")

    def _check_not_lost(self, entry: AdapterEntry, numbers: Collection[int]) -> None:
        """Refuse versions whose files are not in the store and have changed: no replica could read them any more."""
        for version in entry.versions:
            ref = version.ref
            if (
                version.number in numbers
                and not self._files.has(ref)
                and adapter_digest(ref.path, ref.name) != ref.digest
            ):
                raise AdapterError(ref.name, f"the files of its version {version.number} have been overwritten")

    async def _delete_unused(self, refs: Sequence[AdapterRef]) -> None:
        """Delete the copies of contents that no name refers to. The caller holds the lock."""
        used = self.catalogue.digests()
        for ref in refs:
            if ref.digest not in used:
                await asyncio.to_thread(self._files.delete, ref.digest)

    def _base(self, name: str | None) -> AdapterBase:
        if name is None and len(self._bases) == 1:
            return next(iter(self._bases.values()))
        if name is None:
            names = ", ".join(self._bases)
            raise RequestError(f"'base_model_name' must be one of: {names}.", field="base_model_name")
        if name not in self._bases:
            raise unknown_model(name, field="base_model_name")
        return self._bases[name]


def _users(catalogue: Catalogue, ref: AdapterRef) -> set[str]:
    """Return the base models whose adapters have their files in the folder of a content."""
    entries = catalogue.entries.values()
    return {entry.base for entry in entries if any(version.ref.path == ref.path for version in entry.versions)}


@contextmanager
def _refusing(field: str, *, code: str | None = None) -> Iterator[None]:
    """Convert adapter errors to errors of a request field."""
    try:
        with unavailable_on(OSError, sqlite3.OperationalError):
            yield
    except AdapterUnavailableError as error:
        raise UnavailableError(str(error), retry_after_s=RETRY_AFTER_S) from error
    except AdapterError as error:
        raise RequestError(str(error), field=field, code=code) from error
