"""The scans of the drop-in folders: what is new or changed since the last one.

Knows nothing of names, versions and stores: what is found is given to the registry to take in.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence

from adapters.errors import AdapterError
from adapters.registry import Signature, nested_adapters, signatures
from deployments.config import AdapterBase
from engine.errors import OverloadError, RequestError

_logger = logging.getLogger(__name__)

TakeIn = Callable[[str, Signature, AdapterBase], Awaitable[None]]
"""Takes in a sub-folder, given by its name, whose files have a new signature. Errors as in `RegistryServer.register`.
"""


class DropIns:
    """The drop-in folders of the base models; one scan at a time."""

    def __init__(self, bases: Sequence[AdapterBase], take_in: TakeIn) -> None:
        self._bases = bases
        self._take_in = take_in
        self._seen_by_base: dict[str, dict[str, Signature]] = {}
        """Signature of each sub-folder's files at the last scan of a drop-in folder."""
        self._unread: set[str] = set()
        """Bases whose drop-in folder could not be read at the last scan."""
        self._too_deep: set[str] = set()
        """Sub-folders of drop-in folders that have been reported for adapters one level too deep."""

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
        for name, signature in found.items():
            if seen.get(name) == signature:
                continue
            try:
                await self._take_in(name, signature, base)
            except OverloadError:
                continue  # the next scan tries again
            except RequestError as error:
                # The files may still be incomplete; their next change triggers another try.
                _logger.warning("drop-in folder: %s", error.message)
            seen[name] = signature
        for path in await asyncio.to_thread(nested_adapters, root, found.keys()):
            if (folder := os.path.join(root, os.path.dirname(path))) not in self._too_deep:
                self._too_deep.add(folder)
                what = "the adapter in it" if path == os.curdir else path
                _logger.warning("drop-in folder: %s is not loaded; only folders directly in %s are", what, root)
