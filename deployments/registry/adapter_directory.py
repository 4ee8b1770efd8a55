"""What a gateway knows of adapters, and how it has them changed: the registry decides, every gateway follows.

The registry tells all gateways of a change before it answers it, so that no request after the answer meets what was
before. A gateway that could not be told asks by itself, every `REFRESH_S`.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ray.serve.handle import DeploymentHandle

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue
from deployments.config import ModelConfig
from deployments.errors import UnavailableError
from deployments.handle_calls import UNREACHED, ask_actor
from deployments.handles import TELL_TIMEOUT_S, ask_all
from deployments.registry.adapter_changes import AdapterStatus, Registration
from engine.errors import RequestError

_logger = logging.getLogger(__name__)

REFRESH_S = 1.0
RETRY_AFTER_S = 2.0
FIRST_WORD_S = 30.0
"""A registry that has to begin anew takes some seconds; a gateway that starts waits so long for it."""


class AdapterDirectory:
    """The names of adapters as one gateway knows them.

    Args:
        models: their declared adapters are known before the registry has been asked.
        replicas: handle of each base model's deployment, by its name.
        registry: None where names cannot be changed.
    """

    def __init__(
        self,
        models: Sequence[ModelConfig],
        replicas: Mapping[str, DeploymentHandle],
        registry: DeploymentHandle | None,
        *,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._catalogue = declared_catalogue(models)
        self._replicas = replicas
        self._registry = registry
        self._has_heard = registry is None
        self._draw = draw
        self._refresh: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask the registry until it answers, at most for a while, and go on asking."""
        if self._registry is None:
            return
        # What the configuration says is as old as the server: names may stand for other contents by now.
        last_s = time.monotonic() + FIRST_WORD_S
        while not self._has_heard:
            try:
                await self._ask(self._registry)
            except UNREACHED as error:
                if time.monotonic() > last_s:
                    _logger.warning("the registry of adapters cannot be reached yet: %s", error)
                    break
                await asyncio.sleep(REFRESH_S)
        self._refresh = asyncio.create_task(self._ask_for_ever(self._registry))

    def find(self, name: str) -> tuple[AdapterEntry, AdapterVersion] | None:
        """Return what a name stands for, for one request; None where it is not that of an adapter.

        Raises:
            UnavailableError: the registry has not told yet whether it is.
        """
        found = self._catalogue.find(name, self._draw())
        if found is None and not self._has_heard:
            raise UnavailableError("The names of adapters are not known yet.", retry_after_s=RETRY_AFTER_S)
        return None if found is None or found[0].base not in self._replicas else found

    def entries(self) -> list[AdapterEntry]:
        """Return all names of adapters of served models."""
        return [entry for entry in self._catalogue.entries.values() if entry.base in self._replicas]

    def adopt(self, catalogue: Catalogue) -> None:
        """Follow a change, unless a later one is known already."""
        self._has_heard = True
        if catalogue.replaces(self._catalogue):
            self._catalogue = catalogue

    async def load(self, wanted: Registration) -> AdapterEntry:
        """Make the content of a folder or a URL the newest version of a name.

        Raises:
            RequestError: it may not or cannot be.
            UnavailableError: the registry cannot be reached, or the URL's server.
            OverloadError: too many are being loaded.
        """
        catalogue: Catalogue = await self._changed("register", wanted)
        self.adopt(catalogue)
        return catalogue.entries[wanted.name]

    async def load_if(self, wanted: Registration, trial: Callable[[str], Awaitable[None]]) -> AdapterEntry:
        """Load without traffic, try, and only then let the name stand for the content.

        Args:
            trial: asks the content by the name that it is given. What it raises is raised, and the version forgotten
                where it is new.
        """
        before = self._catalogue.entries.get(wanted.name)
        entry = await self.load(replace(wanted, takes_traffic=False))
        number = entry.versions[-1].number
        try:
            await trial(f"{entry.name}@{number}")
        except BaseException:
            is_new = before is None or before.version(number) is None
            now = self._catalogue.entries.get(entry.name)
            if is_new and (now is None or number not in dict(now.split)):
                await self.unload(entry.name, number)
            raise
        return await self.route(entry.name, {number: 100})

    async def route(self, name: str, split: Mapping[int, int]) -> AdapterEntry:
        """Split a name's traffic among its versions, by percentages; errors as `load`."""
        catalogue: Catalogue = await self._changed("route", name, dict(split))
        self.adopt(catalogue)
        return catalogue.entries[name]

    async def unload(self, name: str, number: int | None = None) -> list[int]:
        """Forget a name or a version, wait for the requests that use it, and free it everywhere; errors as `load`.

        Returns the bytes that this freed on each replica. Who leaves meanwhile ends nothing.
        """
        catalogue: Catalogue
        freed: list[int]
        catalogue, freed = await self._changed("unload", name, number)
        self.adopt(catalogue)
        return freed

    async def status(self) -> list[AdapterStatus]:
        """Return all names, and where their contents lie."""
        handles = list(self._replicas.values())
        answers = await asyncio.gather(
            *(ask_all(handle, "adapter_places", timeout_s=TELL_TIMEOUT_S) for handle in handles)
        )
        places = dict(zip(self._replicas, answers, strict=True))
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
            )
            for entry in self.entries()
        ]

    async def _changed(self, method: str, *args: object) -> Any:
        if self._registry is None:
            raise RequestError("This server's adapters cannot be changed while it runs.", field="lora_name")
        absence = "The registry of adapters cannot be reached."
        return await ask_actor(self._registry, method, *args, absence=absence, retry_after_s=RETRY_AFTER_S)

    async def _ask(self, registry: DeploymentHandle) -> None:
        async with asyncio.timeout(TELL_TIMEOUT_S):
            known = self._catalogue.store, self._catalogue.revision
            found: Catalogue | None = await registry.catalogue.remote(*known)
        if found is not None:
            self.adopt(found)

    async def _ask_for_ever(self, registry: DeploymentHandle) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            try:
                await self._ask(registry)
            except UNREACHED as error:
                _logger.debug("the registry of adapters does not answer: %s", error)


def declared_catalogue(models: Sequence[ModelConfig]) -> Catalogue:
    """Return what the configuration tells; older than whatever a registry says."""
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
