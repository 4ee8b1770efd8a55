"""The one actor that says what names of adapters stand for. It validates before anything is served, and remembers.

    register --(files: copied into the store's folder, by digest)--> a version --> every gateway

Gateways and replicas hold nothing of their own: a gateway asks for the catalogue, and a request carries its adapter's
reference to whichever replica it reaches. What was registered outlives all processes (`adapters.store`). Drop-in
folders are watched: a new sub-folder is registered, changed files are a new version.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec

from ray import serve

from adapters.catalogue import Catalogue
from adapters.errors import AdapterError
from adapters.finite import find_not_finite
from adapters.folder import CONFIG_FILE, TENSOR_FILE, open_under, refuse_pickle
from adapters.identity import AdapterRef, content_digest, read_adapter
from adapters.registry import check_name, sub_folders
from adapters.store import AdapterStore, StoreTakenError
from adapters.validate import validate
from deployments.adapter_changes import Registration
from deployments.config import GATEWAY, AdapterBase, RegistryConfig
from deployments.handles import tell_gateways
from engine.errors import RequestError

_logger = logging.getLogger(__name__)

P = ParamSpec("P")

LOCK_POLL_S = 0.2
NUM_LOCK_TRIES = 25


class RegistryServer:
    """The registry; a plain class, the actor is its shell. Changes run one at a time, in a thread.

    Args:
        folder: where files are copied to; None where they stay where they are.
    """

    def __init__(self, store: AdapterStore, bases: Sequence[AdapterBase], *, folder: str | None) -> None:
        self._store = store
        self._bases = {base.name: base for base in bases}
        self._folder = None if folder is None else os.path.realpath(folder)
        self._lock = asyncio.Lock()
        self._seen_by_base: dict[str, dict[str, tuple[int, ...]]] = {}
        """Signature of each sub-folder's files at the last look at a drop-in folder."""
        self._catalogue = store.catalogue()

    @property
    def catalogue(self) -> Catalogue:
        """All names as they stand."""
        return self._catalogue

    async def declare(self, refs_by_base: Mapping[str, Sequence[AdapterRef]]) -> None:
        """Take over the adapters that the configuration names; those that are known already stay as they are.

        What an earlier configuration named and this one does not is forgotten: its files may be anything by now.
        """
        declared = {(ref.name, ref.digest) for refs in refs_by_base.values() for ref in refs}
        async with self._lock:
            for entry in self._catalogue.entries.values():
                for version in entry.versions:
                    if not self._is_ours(version.ref) and (entry.name, version.ref.digest) not in declared:
                        await self._changed(self._store.remove, entry.name, version.number)
            for base, ref in ((base, ref) for base, refs in refs_by_base.items() for ref in refs):
                known = self._catalogue.entries.get(ref.name)
                if known is not None and any(version.ref.digest == ref.digest for version in known.versions):
                    continue
                await self._changed(self._store.add, ref, base)

    async def register(self, wanted: Registration) -> Catalogue:
        """Make a folder's content the newest version of a name, with all of the name's traffic.

        Raises:
            RequestError: the folder may not be used, holds no adapter that fits, or the name is taken.
        """
        base = self._base(wanted.base)
        async with self._lock:
            try:
                self._check_name(wanted, base)
                path = _inside(wanted.folder, _roots(base), wanted.name)
                ref = await asyncio.to_thread(self._take, wanted.name, path, base)
                await self._changed(self._store.add, ref, base.name)
            except AdapterError as error:
                raise _refused(error) from error
        return self._catalogue

    async def route(self, name: str, split: Mapping[int, int]) -> Catalogue:
        """Split a name's traffic among its versions, by percentages.

        Raises:
            RequestError: there is no such name or version, or they do not make 100.
        """
        async with self._lock:
            try:
                await self._changed(self._store.route, name, dict(split))
            except AdapterError as error:
                raise _refused(error, field="split") from error
        return self._catalogue

    async def unregister(self, name: str, number: int | None = None) -> tuple[Catalogue, tuple[AdapterRef, ...]]:
        """Forget a name or a version of it; return also the contents that no name stands for any more.

        Raises:
            RequestError: there is no such name or version.
        """
        async with self._lock:
            before = self._catalogue
            try:
                await self._changed(self._store.remove, name, number)
            except AdapterError as error:
                raise _refused(error, code="model_not_found") from error
            left = self._catalogue.digests()
            gone = tuple(
                version.ref
                for version in before.entries[name].versions
                if version.ref.digest not in left and number in (None, version.number)
            )
        return self._catalogue, gone

    async def discard(self, refs: Sequence[AdapterRef]) -> None:
        """Delete the copies of contents that nobody uses any more, those left out that were registered again."""
        async with self._lock:
            used = self._catalogue.digests()
            for ref in refs:
                if self._is_ours(ref) and ref.digest not in used:
                    await asyncio.to_thread(shutil.rmtree, ref.path, ignore_errors=True)

    async def look(self) -> bool:
        """Look at the drop-in folders; register what is new or changed, and say whether anything was."""
        revision = self._catalogue.revision
        for base in self._bases.values():
            if base.watched is not None:
                await self._look_into(base.watched, base)
        return self._catalogue.revision != revision

    async def _look_into(self, root: str, base: AdapterBase) -> None:
        found = await asyncio.to_thread(_signatures, root)
        is_first = base.name not in self._seen_by_base
        seen = self._seen_by_base.get(base.name, {})
        changed = [name for name, signature in found.items() if seen.get(name) != signature]
        self._seen_by_base[base.name] = found
        for name in changed:
            entry = self._catalogue.entries.get(name)
            if is_first and entry is not None:
                continue  # the configuration has told of it already
            try:
                await self.register(Registration(name=name, folder=name, base=base.name, replaces=True))
            except RequestError as error:
                # It may be on its way still; the next change of its files is another chance.
                _logger.warning("drop-in folder: %s", error.message)

    def _take(self, name: str, path: str, base: AdapterBase) -> AdapterRef:
        """Validate an adapter, and copy its files where nobody changes them."""
        source = path if self._folder is None else self._copied(name, path)
        try:
            config, tensors = read_adapter(name, source)
            validate(name, config, tensors.entry_by_name, base.module_shapes, base.max_rank)
            bad = find_not_finite(tensors)
            if bad is not None:
                raise AdapterError(name, f"tensor {bad!r} holds NaN or infinity")
            digest = content_digest(config, tensors)
        except AdapterError:
            if source != path:
                shutil.rmtree(source, ignore_errors=True)
            raise
        if source == path:
            return AdapterRef(name=name, path=path, digest=digest)
        assert self._folder is not None
        target = os.path.join(self._folder, digest)
        if os.path.isdir(target):
            shutil.rmtree(source)
        else:
            os.replace(source, target)
        return AdapterRef(name=name, path=target, digest=digest)

    def _copied(self, name: str, path: str) -> str:
        assert self._folder is not None
        refuse_pickle(name, path)
        os.makedirs(self._folder, exist_ok=True)
        target = tempfile.mkdtemp(prefix=".incoming-", dir=self._folder)
        try:
            for file in (CONFIG_FILE, TENSOR_FILE):
                with open_under(name, path, file) as source, open(os.path.join(target, file), "xb") as copy:
                    shutil.copyfileobj(source, copy, 1 << 20)
        except (AdapterError, OSError) as error:
            shutil.rmtree(target, ignore_errors=True)
            if isinstance(error, AdapterError):
                raise
            raise AdapterError(name, f"its files cannot be copied ({error.strerror})") from error
        return target

    def _check_name(self, wanted: Registration, base: AdapterBase) -> None:
        check_name(wanted.name)
        if wanted.name in self._bases:
            raise AdapterError(wanted.name, "a base model has this name")
        entry = self._catalogue.entries.get(wanted.name)
        if entry is not None and not wanted.replaces:
            raise AdapterError(wanted.name, "it is loaded already; 'load_inplace' makes another version of it")

    def _is_ours(self, ref: AdapterRef) -> bool:
        """Whether its files are a copy that nobody else changes."""
        return self._folder is not None and ref.path.startswith(os.path.join(self._folder, ""))

    def _base(self, name: str | None) -> AdapterBase:
        if name is None and len(self._bases) == 1:
            return next(iter(self._bases.values()))
        if name is None:
            names = ", ".join(self._bases)
            raise RequestError(f"'base_model_name' must be one of: {names}.", field="base_model_name")
        if name not in self._bases:
            raise RequestError(
                f"The model '{name[:128]}' does not exist.", field="base_model_name", code="model_not_found"
            )
        return self._bases[name]

    async def _changed(self, change: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        await asyncio.to_thread(change, *args, **kwargs)
        self._catalogue = await asyncio.to_thread(self._store.catalogue)


class Registry:
    """The actor: a shell around `RegistryServer` that also looks at the drop-in folders."""

    async def __init__(self, config: RegistryConfig) -> None:  # type: ignore[misc]
        """Open the store, take over what the configuration names, and begin to look; Serve awaits it."""
        store = await asyncio.to_thread(_open_store, config.store_path)
        self._server = RegistryServer(store, config.bases, folder=config.folder)
        await self._server.declare(config.declared_by_base)
        self._watch = asyncio.create_task(self._look_for_ever(config.watch_period_s))

    async def catalogue(self, store: str, revision: int) -> Catalogue | None:
        """Return all names, or None where the caller knows them as they stand."""
        found = self._server.catalogue
        return None if (found.store, found.revision) == (store, revision) else found

    async def register(self, wanted: Registration) -> Catalogue:
        """Make a folder's content the newest version of a name."""
        return await self._server.register(wanted)

    async def route(self, name: str, split: dict[int, int]) -> Catalogue:
        """Split a name's traffic among its versions."""
        return await self._server.route(name, split)

    async def unregister(self, name: str, number: int | None = None) -> tuple[Catalogue, tuple[AdapterRef, ...]]:
        """Forget a name or a version of it."""
        return await self._server.unregister(name, number)

    async def discard(self, refs: tuple[AdapterRef, ...]) -> None:
        """Delete the copies of contents that nobody uses any more."""
        await self._server.discard(refs)

    async def _tell(self) -> None:
        """Tell the gateways at once; one that is not reached asks by itself."""
        gateways = serve.get_deployment_handle(GATEWAY, serve.get_replica_context().app_name)
        await tell_gateways(gateways, self._server.catalogue)

    async def _look_for_ever(self, period_s: float) -> None:
        while True:
            try:
                if await self._server.look():
                    await self._tell()
            except Exception:
                # The task's border: a folder that cannot be read today may be tomorrow.
                _logger.exception("looking at the drop-in folders failed")
            await asyncio.sleep(period_s)


def _open_store(path: str) -> AdapterStore:
    """Open the store, which one registry at a time may have; without it names last as long as this process."""
    for _ in range(NUM_LOCK_TRIES):
        try:
            return AdapterStore(path)
        except StoreTakenError:
            time.sleep(LOCK_POLL_S)
    _logger.warning("%s is another server's: adapters loaded here are forgotten as this one ends", path)
    return AdapterStore(":memory:")


def _roots(base: AdapterBase) -> tuple[str, ...]:
    """Return all folders that adapters may be registered from."""
    return base.allowed if base.watched is None else (base.watched, *base.allowed)


def _inside(folder: str, roots: Sequence[str], name: str) -> str:
    """Return the resolved folder that a client means, which must lie in one of the roots."""
    if not roots:
        raise AdapterError(name, "this server has no folder that adapters may be loaded from")
    for root in map(os.path.realpath, roots):
        try:
            path = os.path.realpath(os.path.join(root, folder))
        except ValueError:
            break
        if path != root and os.path.commonpath((root, path)) == root and os.path.isdir(path):
            return path
    raise AdapterError(name, "there is no such folder among those that adapters may be loaded from")


def _signatures(root: str) -> dict[str, tuple[int, ...]]:
    """Return time and size of the files of every sub-folder that looks like an adapter."""
    found = {}
    for name in sub_folders(root):
        try:
            stats = [os.stat(os.path.join(root, name, file)) for file in (CONFIG_FILE, TENSOR_FILE)]
        except OSError:
            continue
        found[name] = tuple(number for stat in stats for number in (stat.st_mtime_ns, stat.st_size, stat.st_ino))
    return found


def _refused(error: AdapterError, *, field: str = "lora_name", code: str | None = None) -> RequestError:
    return RequestError(str(error), field=field, code=code)
