"""Adapters that cannot be served: names outlive a server, and its next one may have another checkpoint, or lack files.

Blocks: reads the configuration and the tensors' shapes of each adapter, and all of those that are read in place.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from functools import partial

from adapters.catalogue import Catalogue
from adapters.errors import AdapterError
from adapters.identity import AdapterDigest, content_digest, read_adapter
from adapters.validate import validate
from deployments.config import AdapterBase


def misfits(
    catalogue: Catalogue, bases: Sequence[AdapterBase], *, known_to_fit: Collection[AdapterDigest]
) -> dict[str, dict[AdapterDigest, str]]:
    """Return, for each base model, the contents that cannot be served with it, each with the reason.

    What one name has lost, another may have: a content of which any folder can be used is none of them.
    """
    fits: dict[str, set[AdapterDigest]] = {base.name: set(known_to_fit) for base in bases}
    found: dict[str, dict[AdapterDigest, str]] = {base.name: {} for base in bases}
    checks = {base.name: partial(validate, shapes=base.module_shapes, max_rank=base.max_rank) for base in bases}
    for entry in catalogue.entries.values():
        if entry.base not in checks:
            continue
        for ref in (version.ref for version in entry.versions):
            if ref.digest in fits[entry.base]:
                continue
            try:
                config, tensors = read_adapter(entry.name, ref.path, checks[entry.base])
                # A folder of the store is named by its content, which nobody else changes.
                if os.path.basename(ref.path) != ref.digest and content_digest(config, tensors) != ref.digest:
                    raise AdapterError(entry.name, "the files of this version have been overwritten; load it again")
            except AdapterError as error:
                found[entry.base][ref.digest] = error.reason
            else:
                fits[entry.base].add(ref.digest)
                found[entry.base].pop(ref.digest, None)
    return found
