"""A gateway's view of the adapters and its client of the registry, which makes all changes.

The registry acknowledges a change once every gateway has it, so that no later request sees the old state. It notifies
those that it can reach; all poll it every `REFRESH_S`, by which it knows of the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from ray.serve.handle import DeploymentHandle

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue, CatalogueChange, names_taken
from adapters.identity import AdapterDigest
from deployments.config import ModelConfig
from deployments.errors import UnavailableError
from deployments.handle_calls import TELL_TIMEOUT_S, UNREACHED, ask_actor, ask_all, until_answered
from deployments.registry.adapter_changes import AdapterStatus, Place, Registration
from deployments.waits import for_ever
from engine.errors import RequestError

_logger = logging.getLogger(__name__)

REFRESH_S = 1.0
RETRY_AFTER_S = 2.0
FIRST_WORD_S = 30.0
"""How long a starting gateway waits for the registry, which takes some seconds to restart."""


class AdapterDirectory:
    """The adapter names known to one gateway.

    Args:
        gateway: the name by which the registry knows it.
        models: their declared adapters are known before the registry answers.
        replicas: handle of each base model's deployment by name.
        registry: None if adapters cannot be changed.
        cross_encoders: names that no adapter is found under, like those of the base models.
        in_use: returns the adapters of the gateway's running answers.
    """

    def __init__(
        self,
        gateway: str,
        models: Sequence[ModelConfig],
        replicas: Mapping[str, DeploymentHandle],
        registry: DeploymentHandle | None,
        *,
        cross_encoders: Iterable[str] = (),
        in_use: Callable[[], frozenset[AdapterDigest]] = frozenset,
    ) -> None:
        self._gateway = gateway
        self._catalogue = declared_catalogue(models)
        self._replicas = replicas
        self._registry = registry
        self._taken = names_taken(replicas, cross_encoders)
        self._has_heard = registry is None
        self._in_use = in_use
        self._refresh: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Poll the registry until it answers or `FIRST_WORD_S` pass, then keep polling in the background."""
        if self._registry is None:
            return
        # The configuration dates from the server's start: names may have other contents by now.
        last_s = time.monotonic() + FIRST_WORD_S
        while not self._has_heard:
            try:
                await self._ask(self._registry)
            except UNREACHED as error:
                if time.monotonic() > last_s:
                    _logger.warning("the registry of adapters cannot be reached yet: %s", error)
                    break
                await asyncio.sleep(REFRESH_S)
        ask, pause = partial(self._try_to_ask, self._registry), partial(asyncio.sleep, REFRESH_S)
        self._refresh = asyncio.create_task(for_ever(ask, pause, "the registry of adapters could not be asked"))

    def find(self, name: str, draw: float = 0.0) -> tuple[AdapterEntry, AdapterVersion] | None:
        """Return the entry and version that a request to a name uses, or None if no adapter has the name.

        An adapter loaded before a model took its name is not found under its versions either: whoever may use the
        model may not use the adapter.

        Args:
            draw: number in [0, 1) that chooses the version if the name's traffic is split.

        Raises:
            UnavailableError: the name is unknown and the registry has not answered yet.
        """
        if name.partition("@")[0] in self._taken:
            return None
        found = self._catalogue.find(name, draw)
        if found is None and not self._has_heard:
            raise UnavailableError("The names of adapters are not known yet.", retry_after_s=RETRY_AFTER_S)
        return None if found is None or found[0].base not in self._replicas else found

    def entries(self) -> list[AdapterEntry]:
        """Return the entries of all adapters that can be requested: those of served models with names of their own."""
        return [entry for entry in self._loaded() if entry.name not in self._taken]

    def entry(self, name: str) -> AdapterEntry | None:
        """Return a name's entry, whether it can be requested or not."""
        return self._catalogue.entries.get(name)

    @property
    def revision(self) -> tuple[str, int]:
        """What changes whenever `entries` does."""
        return self._catalogue.store, self._catalogue.revision

    def adopt(self, found: Catalogue | CatalogueChange) -> bool:
        """Adopt a catalogue, or a change of it, unless a later one is already known.

        Returns False if what came before the change is not known.
        """
        self._has_heard = True
        catalogue = self._catalogue.after(found) if isinstance(found, CatalogueChange) else found
        if catalogue is None:
            return False
        if catalogue.replaces(self._catalogue):
            self._catalogue = catalogue
        return True

    async def follow(self, found: Catalogue | CatalogueChange) -> None:
        """Adopt what the registry tells, and ask it for what came before that if need be."""
        if not self.adopt(found) and self._registry is not None:
            await self._ask(self._registry)

    async def load(self, wanted: Registration) -> AdapterEntry:
        """Make the content of a folder or a URL the newest version of a name.

        Raises:
            RequestError: the registration is not permitted or not possible.
            UnavailableError: the registry or the URL's server cannot be reached.
            OverloadError: too many adapters are being loaded.
        """
        return await self._change("register", wanted)

    async def load_if(self, wanted: Registration, trial: Callable[[str], Awaitable[None]]) -> AdapterEntry:
        """Load without traffic, run a trial, and only then route the wanted share of the traffic to the content.

        Args:
            trial: queries the content under the name it is given. Its exceptions propagate; the version is then
                unloaded if it is new, has no traffic, and nobody else has loaded the same content meanwhile.
        """
        wanted = replace(wanted, is_tried=True)
        number = (await self.load(wanted)).versions[-1].number
        try:
            await trial(f"{wanted.name}@{number}")
            return await self._change("admit", wanted, number)
        except BaseException:
            await self._call("withdraw", wanted.name, number)
            await self._catch_up()
            raise

    async def route(self, name: str, split: Mapping[int, int]) -> AdapterEntry:
        """Split a name's traffic among its versions by percentages. Errors as in `load`."""
        return await self._change("route", name, dict(split))

    async def unload(self, name: str, number: int | None = None) -> list[int]:
        """Remove a name or a version, wait for the requests that use it, and free it everywhere. Errors as in `load`.

        Returns the bytes freed on each replica. The removal completes even if the caller is cancelled.
        """
        freed: list[int] = await self._call("unload", name, number)
        await self._catch_up()
        return freed

    async def status(self) -> list[AdapterStatus]:
        """Return all adapters of served models and where their contents reside."""
        handles = self._replicas.values()
        asked = (ask_all(handle, "adapter_places", timeout_s=TELL_TIMEOUT_S) for handle in handles)
        answers, misfits = await asyncio.gather(asyncio.gather(*asked), self._misfits())
        return await asyncio.to_thread(self._statuses, dict(zip(self._replicas, answers, strict=True)), misfits)

    def _statuses(
        self,
        places: Mapping[str, Sequence[tuple[str, Mapping[AdapterDigest, Place]]]],
        misfits: Mapping[str, Mapping[AdapterDigest, str]],
    ) -> list[AdapterStatus]:
        return [
            AdapterStatus(
                entry=entry,
                places_by_replica={
                    version.number: {
                        replica: found[version.ref.digest]
                        for replica, found in places[entry.base]
                        if version.ref.digest in found
                    }
                    for version in entry.versions
                },
                misfits={
                    version.number: misfits[entry.base][version.ref.digest]
                    for version in entry.versions
                    if version.ref.digest in misfits.get(entry.base, {})
                },
                shadowed_by=self._taken.get(entry.name),
            )
            for entry in self._loaded()
        ]

    def _loaded(self) -> list[AdapterEntry]:
        return [entry for entry in self._catalogue.entries.values() if entry.base in self._replicas]

    async def _misfits(self) -> Mapping[str, Mapping[AdapterDigest, str]]:
        """Return the contents that do not fit, for each base model, and why; empty if no registry answers."""
        answers = [] if self._registry is None else await ask_all(self._registry, "misfits", timeout_s=TELL_TIMEOUT_S)
        return answers[0] if answers else {}

    async def _change(self, method: str, *args: object) -> AdapterEntry:
        """Have the registry change a name; return the name's entry, which this gateway then has, too."""
        entry: AdapterEntry = await self._call(method, *args)
        if self.entry(entry.name) != entry:
            await self._catch_up()
        return entry

    async def _call(self, method: str, *args: object) -> Any:
        if self._registry is None:
            raise RequestError("This server's adapters cannot be changed while it runs.", field="lora_name")
        absence = "The registry of adapters cannot be reached."
        return await ask_actor(self._registry, method, *args, absence=absence, retry_after_s=RETRY_AFTER_S)

    async def _catch_up(self) -> None:
        """Ask for a change, because who made it is to see it though the registry has not reached this gateway."""
        if self._registry is not None:
            await self._try_to_ask(self._registry)

    async def _ask(self, registry: DeploymentHandle) -> None:
        """Adopt the registry's catalogue if it is new, and confirm that by asking once more."""
        async with asyncio.timeout(TELL_TIMEOUT_S):
            for _ in range(2):
                known = self._catalogue.store, self._catalogue.revision
                asked = registry.catalogue.remote(self._gateway, *known, self._in_use())
                found: Catalogue | CatalogueChange | None = await until_answered(asked)
                if found is None:
                    return
                self.adopt(found)

    async def _try_to_ask(self, registry: DeploymentHandle) -> None:
        try:
            await self._ask(registry)
        except UNREACHED as error:
            _logger.debug("the registry of adapters does not answer: %s", error)


def declared_catalogue(models: Sequence[ModelConfig]) -> Catalogue:
    """Return the catalogue of the configuration, which any catalogue of a registry replaces."""
    entries = {
        ref.name: AdapterEntry(
            name=ref.name,
            base=model.name,
            versions=(AdapterVersion(number=1, ref=ref, created_s=0),),
            split=((1, 100),),
        )
        for model in models
        for ref in model.adapters
    }
    return Catalogue(revision=-1, entries=entries)
