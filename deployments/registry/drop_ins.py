"""The scans of the drop-in folders: what is new or changed since the last one.

Knows nothing of names, versions and stores: what is found is given to the registry to take in.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from adapters.errors import AdapterError
from adapters.registry import Signature, nested_adapters, signatures
from deployments.config import AdapterBase
from engine.errors import OverloadError, RequestError

_logger = logging.getLogger(__name__)

FIRST_WAIT_S, MAX_WAIT_S = 1.0, 60.0
"""After how long what the server had no room for is tried again; the wait doubles each time."""

TakeIn = Callable[[str, Signature, AdapterBase], Awaitable[None]]
"""Takes in a sub-folder, given by its name, whose files have a new signature. Errors as in `RegistryServer.register`.
"""


@dataclass(frozen=True, slots=True)
class _Postponed:
    """`signature` was refused for want of room; it is tried again at `until_s`, `wait_s` after that was found."""

    signature: Signature
    wait_s: float
    until_s: float


class DropIns:
    """The drop-in folders of the base models; one scan at a time."""

    def __init__(
        self, bases: Sequence[AdapterBase], take_in: TakeIn, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bases = bases
        self._take_in = take_in
        self._clock = clock
        self._seen_by_base: dict[str, dict[str, Signature]] = {}
        """Signature of each sub-folder's files at the last scan of a drop-in folder."""
        self._unread: set[str] = set()
        """Bases whose drop-in folder could not be read at the last scan."""
        self._too_deep: set[str] = set()
        """Sub-folders of drop-in folders that have been reported for adapters one level too deep."""
        self._postponed: dict[tuple[str, str], _Postponed] = {}
        """Sub-folders that the server has no room for now, by base and name."""

    def know(self, seen: Mapping[str, Signature]) -> None:
        """Take sub-folders with these signatures, by name, for seen already."""
        self._seen_by_base = {base.name: dict(seen) for base in self._bases}

    async def look(self) -> None:
        """Scan the folders and take in what is new or changed."""
        for base in self._bases:
            if base.watched is None:
                continue
            try:
                await self._look_into(base.watched, base)
                self._unread.discard(base.name)
            except (AdapterError, OSError) as error:
                # Go on with the other folders, and log this only once.
                if base.name not in self._unread:
                    _logger.warning("drop-in folder: %s", error)
                self._unread.add(base.name)

    async def _look_into(self, root: str, base: AdapterBase) -> None:
        found = await asyncio.to_thread(signatures, root)
        seen = self._seen_by_base.setdefault(base.name, {})
        for name in seen.keys() - found.keys():
            del seen[name]
        for key in [key for key in self._postponed if key[0] == base.name and key[1] not in found]:
            del self._postponed[key]
        for name, signature in found.items():
            if seen.get(name) == signature or self._waits(base, name, signature):
                continue
            try:
                await self._take_in(name, signature, base)
            except OverloadError as error:
                self._postpone(base, name, signature, error.message)
                continue
            except RequestError as error:
                # The files may still be incomplete; their next change triggers another try.
                _logger.warning("drop-in folder: %s", error.message)
            self._postponed.pop((base.name, name), None)
            seen[name] = signature
        for path in await asyncio.to_thread(nested_adapters, root, found.keys()):
            if (folder := os.path.join(root, os.path.dirname(path))) not in self._too_deep:
                self._too_deep.add(folder)
                what = "the adapter in it" if path == os.curdir else path
                _logger.warning("drop-in folder: %s is not loaded; only folders directly in %s are", what, root)

    def _waits(self, base: AdapterBase, name: str, signature: Signature) -> bool:
        """Tell whether a sub-folder is not to be tried yet; with other files, it is tried at once."""
        known = self._postponed.get((base.name, name))
        return known is not None and known.signature == signature and self._clock() < known.until_s

    def _postpone(self, base: AdapterBase, name: str, signature: Signature, reason: str) -> None:
        """Note that there was no room for a sub-folder: each attempt reads all of it. Log this only once."""
        known = self._postponed.get((base.name, name))
        if known is None:
            _logger.warning("drop-in folder: %s It is tried again until it can be loaded.", reason)
        wait_s = FIRST_WAIT_S
        if known is not None and known.signature == signature:
            wait_s = min(MAX_WAIT_S, 2 * known.wait_s)
        self._postponed[base.name, name] = _Postponed(signature, wait_s, self._clock() + wait_s)
