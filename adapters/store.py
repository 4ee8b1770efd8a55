"""Adapter names persisted in one SQLite file. Standard library only.

Only one process opens the store (`deployments.registry.adapter_registry`); its methods are for one thread at a time.
Every change is atomic.
"""

from __future__ import annotations

import fcntl
import json
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

from adapters.catalogue import AdapterEntry, AdapterVersion, Catalogue, CatalogueChange
from adapters.errors import AdapterError
from adapters.identity import AdapterDigest, AdapterRef
from adapters.private_file import make_private, make_private_folder
from adapters.registry import Signature, check_name
from adapters.store_schema import SCHEMA

MAX_CHANGES = 10_000
"""How many changes are kept: after so many, they are forgotten, and whoever is behind gets the whole catalogue."""


class StoreTakenError(Exception):
    """Another process holds the store.

    Attributes:
        holder: as that process has given it.
        build: that process's `AdapterStore.build`.
    """

    def __init__(self, path: str, holder: str) -> None:
        super().__init__(path)
        self.holder = holder
        self.build = ""
        with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as database:
            self.build = _build(database)


class AdapterStore:
    """The catalogue in a file, which this object locks exclusively.

    Args:
        path: of the file; created with its folder if missing; ":memory:" for a store that is not persisted.
        holder: told to other processes that want the store meanwhile.
        max_versions: bound on the versions of a name that have had traffic, and on those on trial; at least 2.

    Raises:
        StoreTakenError: another process holds the store.
        OSError, sqlite3.Error: the file cannot be created or is not an adapter store.
    """

    def __init__(
        self, path: str, *, holder: str = "", max_versions: int = 64, clock: Callable[[], float] = time.time
    ) -> None:
        self._lock_file = None
        if path != ":memory:":
            make_private_folder(Path(path).parent)
            make_private(Path(path))
            self._lock_file = open(f"{path}.lock", "a+")  # noqa: SIM115 - held open as long as the store is
            try:
                # The kernel releases the lock however the process ends.
                fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                with self._lock_file:
                    self._lock_file.seek(0)
                    raise StoreTakenError(path, self._lock_file.read()) from error
            self._lock_file.truncate(0)
            self._lock_file.write(holder)
            self._lock_file.flush()
        self._max_versions = max_versions
        self._clock = clock
        # A registry calls from threads, one at a time.
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=FULL")
        self._database.executescript(SCHEMA)
        store, revision = self._database.execute("SELECT store, value FROM revision").fetchone()
        self._catalogue = Catalogue(store=store, revision=revision, entries=self._entries())
        self._changes: tuple[int, list[str]] = (revision, [])
        """A revision, and the name that each later one changed."""
        self._open_entries: dict[str, AdapterEntry] | None = None

    def add(self, ref: AdapterRef, base: str, *, percent: int = 100, served: Collection[str] | None = None) -> int:
        """Make a content the newest version of its name, with a share of the name's traffic; return its number.

        Numbers are never reused, even after a removal.
        With 0 percent, the version is reachable only by its number until it is routed to, and the split is unchanged
        (empty for a new name). The other versions keep their proportions in the rest (`AdapterEntry.split_with`).
        If the newest version already has this content, it keeps its number. If the name is at its limit of versions,
        the oldest ones without traffic are removed, but none that has had traffic for one on trial.

        Args:
            served: the base models that there are now: a name that belongs to any other is free, and loses what it
                stood for. None if all are.

        Raises:
            AdapterError: the name is invalid, belongs to another base, or has too many versions with traffic.
        """
        check_name(ref.name)
        entry = self._catalogue.entries.get(ref.name)
        if entry is not None and served is not None and entry.base not in served:
            self.remove(ref.name)
            entry = None
        versions = () if entry is None else entry.versions
        if entry is not None and entry.base != base:
            raise AdapterError(ref.name, f"the name stands for an adapter of the base model {entry.base}")
        is_known = bool(versions) and versions[-1].ref.digest == ref.digest
        if entry is not None and not is_known:
            self._check_room(entry)
        with self._change(ref.name):
            if is_known:
                number = versions[-1].number
                self._database.execute(
                    "UPDATE version SET path = ? WHERE name = ? AND number = ?", (ref.path, ref.name, number)
                )
            else:
                number = 1 + max(self._last_removed(ref.name), *(version.number for version in versions), 0)
                row = (ref.name, number, base, ref.digest, ref.path, int(self._clock()))
                self._database.execute("INSERT INTO version VALUES (?, ?, ?, ?, ?, ?)", row)
                self._database.execute("INSERT INTO trial VALUES (?, ?)", (ref.name, number))
                if ref.invocation_ids:
                    invocation = (ref.name, number, json.dumps(ref.invocation_ids))
                    self._database.execute("INSERT INTO invocation VALUES (?, ?, ?)", invocation)
                if ref.num_labels:
                    self._database.execute("INSERT INTO head VALUES (?, ?, ?)", (ref.name, number, ref.num_labels))
            if percent:
                split = {number: 100} if entry is None else entry.split_with(number, percent)
                if entry is not None:
                    self._make_room(entry, split)
                self._split(ref.name, split)
            elif not is_known:
                on_trial = [version.number for version in versions if version.is_on_trial]
                self._forget(ref.name, on_trial[: max(0, len(on_trial) + 1 - self._max_versions)])
        return number

    def route(self, name: str, split: Mapping[int, int]) -> None:
        """Split a name's traffic among versions, by percentages that sum to 100; a version with 0 gets none.

        Versions that get their first traffic make others go, as in `add`, if there are any that may.

        Raises:
            AdapterError: there is no such name or version, a percentage is below 0, or they do not sum to 100.
        """
        entry = self._check_known(name, split)
        if sum(split.values()) != 100 or any(percent < 0 for percent in split.values()):
            raise AdapterError(name, "the percentages must not be negative, and make 100 together")
        with self._change(name):
            shares = {number: percent for number, percent in split.items() if percent}
            self._make_room(entry, shares)
            self._split(name, shares)

    def remove(self, name: str, number: int | None = None) -> None:
        """Remove a name, or one version, whose traffic share goes to others (`AdapterEntry.split_without`).

        Raises:
            AdapterError: there is no such name or version.
        """
        entry = self._check_known(name, () if number is None else (number,))
        removed = max(v.number for v in entry.versions if number in (None, v.number))
        with self._change(name):
            removed = max(removed, self._last_removed(name))
            self._database.execute("INSERT OR REPLACE INTO last_removed VALUES (?, ?)", (name, removed))
            if number is None:
                for table in ("version", "split", "trial", "tried", "invocation", "head"):
                    self._database.execute(f"DELETE FROM {table} WHERE name = ?", (name,))
                return
            self._forget(name, [number])
            self._split(name, entry.split_without(number))

    def repoint(self, ref: AdapterRef) -> None:
        """Record the current folder of a content of a name."""
        with self._change(ref.name):
            place = (ref.path, ref.name, ref.digest)
            self._database.execute("UPDATE version SET path = ? WHERE name = ? AND digest = ?", place)

    @property
    def build(self) -> str:
        """The `build` that was last passed to `tell`."""
        return _build(self._database)

    def told(self, name: str) -> str | None:
        """Return the digest that `tell` last recorded for a name, if any."""
        row = self._database.execute("SELECT digest FROM told WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def signatures(self) -> dict[str, Signature]:
        """Return the signatures that `tell` last recorded, by name."""
        return dict(self._database.execute("SELECT name, signature FROM told"))

    def tell(self, contents: Iterable[tuple[str, AdapterDigest, Signature]], build: str | None = None) -> None:
        """Record the contents that names have in their source folders, and the build that reported them.

        Args:
            contents: (name, digest, signature of the files); the signature is empty for files that are not watched.
        """
        with self._whole():
            self._database.executemany("INSERT OR REPLACE INTO told VALUES (?, ?, ?)", contents)
            if build is not None:
                self._database.execute("INSERT OR REPLACE INTO build VALUES (0, ?)", (build,))

    def tried(self) -> set[tuple[str, int]]:
        """Return the versions, by name and number, that `set_tried` has marked and that have had no traffic since."""
        return set(self._database.execute("SELECT name, number FROM tried"))

    def set_tried(self, name: str, number: int, *, is_tried: bool) -> None:
        """Mark a version as loaded for nothing but a trial, or as loaded for good."""
        change = (
            "INSERT OR IGNORE INTO tried VALUES (?, ?)"
            if is_tried
            else "DELETE FROM tried WHERE name = ? AND number = ?"
        )
        with self._whole():
            self._database.execute(change, (name, number))

    def catalogue(self) -> Catalogue:
        """Return the current catalogue, names in sorted order."""
        return self._catalogue

    def since(self, store: str, revision: int) -> Catalogue | CatalogueChange | None:
        """Return what has changed since a revision, the whole catalogue if that is not known, or None if nothing has.

        Changes are known since this object was made, as far as `MAX_CHANGES` reach.
        """
        now = self._catalogue
        if (store, revision) == (now.store, now.revision):
            return None
        first, names = self._changes
        if store != now.store or not first <= revision < now.revision:
            return now
        entries = {name: now.entries.get(name) for name in names[revision - first : now.revision - first]}
        return CatalogueChange(store=store, since=revision, revision=now.revision, entries=entries)

    def _entries(self, only: str | None = None) -> dict[str, AdapterEntry]:
        """Read all names, or only one, from the database."""
        where, values = ("", ()) if only is None else ("WHERE name = ?", (only,))
        versions: dict[str, list[AdapterVersion]] = {}
        base_by_name: dict[str, str] = {}
        rows = self._database.execute(
            f"SELECT name, number, base, digest, path, created_s FROM version {where} ORDER BY 1, 2", values
        )
        read = self._database.execute(f"SELECT * FROM invocation {where}", values)
        invocations = {(name, number): tuple(json.loads(token_ids)) for name, number, token_ids in read}
        read = self._database.execute(f"SELECT * FROM head {where}", values)
        labels = {(name, number): num_labels for name, number, num_labels in read}
        on_trial = set(self._database.execute(f"SELECT name, number FROM trial {where}", values))
        for name, number, base, digest, path, created_s in rows:
            key, digest = (name, number), AdapterDigest(digest)
            ids, count = invocations.get(key, ()), labels.get(key, 0)
            ref = AdapterRef(name=name, path=path, digest=digest, invocation_ids=ids, num_labels=count)
            version = AdapterVersion(number=number, ref=ref, created_s=created_s, is_on_trial=key in on_trial)
            versions.setdefault(name, []).append(version)
            base_by_name[name] = base
        split: dict[str, list[tuple[int, int]]] = {}
        rows = self._database.execute(f"SELECT name, number, percent FROM split {where} ORDER BY 1, 2", values)
        for name, number, percent in rows:
            split.setdefault(name, []).append((number, percent))
        return {
            name: AdapterEntry(
                name=name, base=base_by_name[name], versions=tuple(found), split=tuple(split.get(name, ()))
            )
            for name, found in versions.items()
        }

    def close(self) -> None:
        """Close the file."""
        self._database.close()
        if self._lock_file is not None:
            self._lock_file.close()

    @contextmanager
    def _change(self, name: str) -> Iterator[None]:
        """Run a block that changes one name as one transaction, and increase the revision by one.

        What is refused is refused before it writes: within `together`, only another failure undoes what was written.
        """
        is_open = self._open_entries is not None
        with nullcontext() if is_open else self._whole():
            yield
            self._database.execute("UPDATE revision SET value = value + 1")
        # Reread only this name: there may be thousands.
        before = self._catalogue
        entries = dict(before.entries) if self._open_entries is None else self._open_entries
        entries.pop(name, None)
        entries |= self._entries(name)
        if not is_open:
            entries = dict(sorted(entries.items()))
        # Before the catalogue: `since` may be called on another thread.
        self._note(name, before.revision)
        self._catalogue = replace(before, revision=before.revision + 1, entries=entries)

    def _note(self, name: str, revision: int) -> None:
        """Note that the revision after this one changes a name."""
        first, names = self._changes
        # Behind it stand changes that were undone.
        del names[revision - first :]
        names.append(name)
        if len(names) > MAX_CHANGES:
            self._changes = (revision + 1, [])

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run all changes of a block as one transaction; one that is refused leaves no trace in it.

        A thousand separate transactions would wait for the disk a thousand times. No other caller may use the store
        meanwhile.
        """
        before = self._catalogue
        self._open_entries = dict(before.entries)
        self._catalogue = replace(before, entries=self._open_entries)
        try:
            with self._whole():
                yield
        except BaseException:
            self._catalogue = before
            raise
        else:
            entries = dict(sorted(self._open_entries.items()))
            self._catalogue = replace(self._catalogue, entries=entries)
        finally:
            self._open_entries = None

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Run a block as one transaction."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            # SQLite ends a transaction by itself on a full disk, but not on every other failure; a transaction left
            # open would make each later change fail.
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _last_removed(self, name: str) -> int:
        row = self._database.execute("SELECT number FROM last_removed WHERE name = ?", (name,)).fetchone()
        return 0 if row is None else int(row[0])

    def _check_known(self, name: str, numbers: Iterable[int]) -> AdapterEntry:
        """Return the entry of a name that has all of these versions."""
        entry = self._catalogue.entries.get(name)
        if entry is None:
            raise AdapterError(name[:128], "there is no adapter of this name")
        for number in numbers:
            if entry.version(number) is None:
                raise AdapterError(name, f"it has no version {number}")
        return entry

    def _check_room(self, entry: AdapterEntry) -> None:
        """Refuse one more version if there would be no room for it once it had traffic."""
        seasoned, idle = self._idle(entry)
        if len(seasoned) + 1 - self._max_versions > len(idle):
            reason = f"it has {len(entry.versions)} versions, and too few without traffic to make room"
            raise AdapterError(entry.name, f"{reason}; unload some of them first")

    def _make_room(self, entry: AdapterEntry, split: Mapping[int, int]) -> None:
        """Remove the oldest idle versions for those that a split gives their first traffic."""
        seasoned, idle = self._idle(entry)
        num_over = max(0, len({*seasoned, *split}) - self._max_versions)
        self._forget(entry.name, [number for number in idle if number not in split][:num_over])

    def _idle(self, entry: AdapterEntry) -> tuple[list[int], list[int]]:
        """Return the versions that are not on trial, and those of them without traffic, except the newest."""
        seasoned = [version.number for version in entry.versions if not version.is_on_trial]
        return seasoned, [number for number in seasoned[:-1] if number not in dict(entry.split)]

    def _forget(self, name: str, numbers: Sequence[int]) -> None:
        going = [(name, number) for number in numbers]
        for table in ("version", "trial", "tried", "invocation", "head"):
            self._database.executemany(f"DELETE FROM {table} WHERE name = ? AND number = ?", going)

    def _split(self, name: str, split: Mapping[int, int]) -> None:
        going = [(name, number) for number in split]
        for table in ("trial", "tried"):
            self._database.executemany(f"DELETE FROM {table} WHERE name = ? AND number = ?", going)
        self._database.execute("DELETE FROM split WHERE name = ?", (name,))
        self._database.executemany("INSERT INTO split VALUES (?, ?, ?)", [(name, *share) for share in split.items()])


def _build(database: sqlite3.Connection) -> str:
    row = database.execute("SELECT value FROM build").fetchone()
    return "" if row is None else str(row[0])
