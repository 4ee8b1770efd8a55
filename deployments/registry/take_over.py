"""What a new configuration changes in the catalogue that earlier ones have left. Blocks; one transaction.

Versions whose files are in the store outlive their configuration. Those read in place last as long as a configuration
declares them; others are removed, unless a version that has no traffic would have to answer for them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from adapters.catalogue import AdapterEntry, AdapterVersion
from adapters.errors import AdapterError
from adapters.file_store import FileStore
from adapters.identity import AdapterDigest, AdapterRef
from adapters.store import AdapterStore

_logger = logging.getLogger(__name__)

_Declared = Mapping[tuple[str, AdapterDigest], AdapterRef]


def take_over(store: AdapterStore, files: FileStore, refs_by_base: Mapping[str, Sequence[AdapterRef]]) -> None:
    """Update the catalogue with what is new in a configuration."""
    with store.together():
        declared = {(ref.name, ref.digest): ref for refs in refs_by_base.values() for ref in refs}
        base_by_name = {ref.name: base for base, refs in refs_by_base.items() for ref in refs}
        lost: list[tuple[str, int]] = []
        for entry in list(store.catalogue().entries.values()):
            if base_by_name.get(entry.name, entry.base) != entry.base:
                _logger.warning(
                    "the adapter %r, loaded earlier, is one of %s; the configuration has another of this name for %s",
                    *(entry.name, entry.base, base_by_name[entry.name]),
                )
                store.remove(entry.name)
            else:
                lost += [(entry.name, version.number) for version in _settle(store, files, entry, declared)]
        for base, refs in refs_by_base.items():
            for ref in refs:
                _add(store, base, ref)
        # What was added may have taken over their traffic.
        for name, number in lost:
            _drop(store, name, number)


def _settle(
    store: AdapterStore, files: FileStore, entry: AdapterEntry, declared: _Declared
) -> Sequence[AdapterVersion]:
    """Point the versions of a name to their files, or remove those whose files are gone.

    Returns the ones that cannot be removed yet, because they have traffic and the name has versions that can be served.
    """
    lost = []
    for version in entry.versions:
        ref = version.ref
        if files.has(ref):
            continue
        # The files are elsewhere now, or they are in the store, whose folder was moved.
        found = declared.get((entry.name, ref.digest)) or files.find(ref)
        if found is None:
            lost.append(version)
        elif found.path != ref.path:
            store.repoint(replace(ref, path=found.path))
    if len(lost) == len(entry.versions):
        store.remove(entry.name)
        return ()
    shares = dict(entry.split)
    for version in lost:
        if version.number not in shares:
            store.remove(entry.name, version.number)
    return [version for version in lost if version.number in shares]


def _add(store: AdapterStore, base: str, ref: AdapterRef) -> None:
    entry = store.catalogue().entries.get(ref.name)
    known = () if entry is None else entry.versions
    # A version that was unloaded does not come back while its name has others.
    if any(ref.digest in (version.ref.digest, store.told(ref.name)) for version in known):
        return
    try:
        store.add(ref, base)
    except AdapterError as error:
        _logger.warning("of the configuration: %s", error)


def _drop(store: AdapterStore, name: str, number: int) -> None:
    """Remove a version whose files are gone, unless it has all of the traffic, which nobody has given to another."""
    entry = store.catalogue().entries[name]
    version = entry.version(number)
    if version is None:
        return  # it has made room for what was added
    shares = entry.split_without(number)
    if dict(entry.split) == {number: 100}:
        then = "no other version has traffic, so that its requests may fail until another one is routed to"
    elif number in dict(entry.split):
        then = "its traffic goes to " + ", ".join(f"version {other} ({share}%)" for other, share in shares.items())
    else:
        then = "it had no traffic any more"
    _logger.warning(
        "version %d of the adapter %r, read from %s, is not in the configuration any more: %s",
        *(number, name, version.ref.path, then),
    )
    if dict(entry.split) != {number: 100}:
        store.remove(name, number)
