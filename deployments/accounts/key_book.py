"""The API keys created at run time, and which of them changed since a gateway last asked. Standard library only."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterable

from deployments.accounts.values import KeyChanges, KeyInfo

MAX_CHANGES = 10_000
"""After so many changes, every gateway is told all keys once, and the changes are forgotten."""


class KeyBook:
    """All keys and their latest changes. Thread-safe."""

    def __init__(self, keys: Iterable[KeyInfo]) -> None:
        self._lock = threading.Lock()
        self._key_by_digest = {key.digest: key for key in keys}
        self._begin()

    def put(self, key: KeyInfo) -> None:
        """Add a key."""
        with self._lock:
            self._key_by_digest[key.digest] = key
            self._note(key.digest)

    def drop(self, digest: str) -> None:
        """Remove a key, if there is one."""
        with self._lock:
            if self._key_by_digest.pop(digest, None) is not None:
                self._note(digest)

    def all_keys(self) -> list[KeyInfo]:
        """Return all keys, of all tenants; without what was dropped."""
        with self._lock:
            return list(self._key_by_digest.values())

    def since(self, version: str) -> KeyChanges | None:
        """Return what has changed since a version, or all keys if that is not known; None if nothing has."""
        with self._lock:
            epoch, _, number = version.partition(" ")
            is_known = epoch == self._epoch
            changed = self._changed[int(number) :] if is_known else self._key_by_digest
            if is_known and not changed:
                return None
            keys = {digest: self._key_by_digest.get(digest) for digest in changed}
            return KeyChanges(
                version=f"{self._epoch} {len(self._changed)}",
                is_whole=not is_known,
                tenant_by_key={digest: None if key is None else key.tenant for digest, key in keys.items()},
            )

    def _note(self, digest: str) -> None:
        self._changed.append(digest)
        if len(self._changed) > MAX_CHANGES:
            self._begin()

    def _begin(self) -> None:
        # Another one in each process of the accounts, too, whose predecessor may have told more.
        self._epoch = uuid.uuid4().hex
        self._changed: list[str] = []
