"""Adapter names: the versions of each name and how its traffic is split among them. Pure.

sql            one of the versions in the split, drawn by percentage
sql@3          version 3
sql@latest     the newest version that is not on trial
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from adapters.identity import AdapterRef

LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """One version of an adapter; `created_s` is Unix time.

    Attributes:
        is_on_trial: it was added without traffic and has never had any; it is reachable only by its number.
    """

    number: int
    ref: AdapterRef
    created_s: int
    is_on_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """An adapter name.

    Attributes:
        base: name of the base model.
        versions: oldest first, at least one.
        split: (version, percentage of the name's traffic); the percentages sum to 100. Empty while the name itself
            cannot be requested, only its versions: its first version is still on trial.
    """

    name: str
    base: str
    versions: tuple[AdapterVersion, ...]
    split: tuple[tuple[int, int], ...]

    def version(self, number: int) -> AdapterVersion | None:
        """Return a version by its number."""
        return next((version for version in self.versions if version.number == number), None)

    @property
    def latest(self) -> AdapterVersion | None:
        """The newest version that is not on trial."""
        return next((version for version in reversed(self.versions) if not version.is_on_trial), None)

    def split_with(self, number: int, percent: int) -> dict[int, int]:
        """Return the split if a version gets `percent` (1 to 100) of the traffic and the others keep their proportions.

        Others whose share rounds to nothing are left out. If there are none, the version gets all of the traffic.
        """
        others = [(other, share) for other, share in self.split if other != number]
        return {number: percent if others else 100} | _in_proportion(others, 100 - percent)

    def split_without(self, number: int) -> dict[int, int]:
        """Return the split once a version is removed: the others that have traffic share its part in proportion.

        If it has all of the traffic, the newest other version that is not on trial gets it; without one, nobody does.
        """
        others = [(other, share) for other, share in self.split if other != number]
        left = [version.number for version in self.versions if version.number != number and not version.is_on_trial]
        if self.split and not others and left:
            return {max(left): 100}
        return _in_proportion(others, 100)

    def pick(self, draw: float) -> AdapterVersion:
        """Return the version that serves a request; `draw` is uniform in [0, 1)."""
        reached = 0
        for number, percent in self.split:
            reached += percent
            found = self.version(number)
            if found is not None and draw * 100 < reached:
                return found
        return self.versions[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Catalogue:
    """All names at one moment.

    Attributes:
        store: identity of the store that it was read from.
        revision: of this store; increases with every change.
    """

    store: str = ""
    revision: int = 0
    entries: Mapping[str, AdapterEntry] = field(default_factory=dict)

    def find(self, name: str, draw: float) -> tuple[AdapterEntry, AdapterVersion] | None:
        """Return the entry and version that a public name refers to, or None if it is not an adapter's name."""
        alias, mark, wanted = name.partition("@")
        entry = self.entries.get(alias)
        if entry is None:
            return None
        if not mark:
            return (entry, entry.pick(draw)) if entry.split else None
        if wanted == LATEST:
            return None if entry.latest is None else (entry, entry.latest)
        # Compare the spelling, so that a version cannot be requested, and counted, under several names ("3", "03").
        version = next((version for version in entry.versions if str(version.number) == wanted), None)
        return None if version is None else (entry, version)

    def replaces(self, other: Catalogue) -> bool:
        """Whether this catalogue supersedes `other`: it comes from another store, or is not older."""
        return self.store != other.store or self.revision >= other.revision

    def after(self, change: CatalogueChange) -> Catalogue | None:
        """Return the catalogue after a change, names in sorted order; None if it lacks what came before the change."""
        if self.store != change.store or self.revision < change.since:
            return None
        if change.revision <= self.revision:
            return self
        entries = {**self.entries, **change.entries}
        kept = {name: entry for name in sorted(entries) if (entry := entries[name]) is not None}
        return Catalogue(store=self.store, revision=change.revision, entries=kept)

    def digests(self) -> frozenset[str]:
        """Return the digests of all versions of all names."""
        return frozenset(version.ref.digest for entry in self.entries.values() for version in entry.versions)

    def gone(self, name: str, before: Catalogue) -> tuple[AdapterRef, ...]:
        """Return the versions that a name had in `before` and whose content no name of the same base has any more."""
        entry, now = before.entries.get(name), self.entries.get(name)
        if entry is None:
            return ()
        kept = {version.ref.digest for version in now.versions} if now else set()
        missing = [version.ref for version in entry.versions if version.ref.digest not in kept]
        if not missing:
            return ()
        others = (other for other in self.entries.values() if other.base == entry.base)
        used = {version.ref.digest for other in others for version in other.versions}
        return tuple(ref for ref in missing if ref.digest not in used)


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueChange:
    """What has changed in a store's catalogue between two revisions: of thousands of names, usually one.

    Attributes:
        since: the earlier revision; a catalogue of any revision from this one on can be changed.
        entries: the names that changed; None for those that are gone.
    """

    store: str
    since: int
    revision: int
    entries: Mapping[str, AdapterEntry | None]


def names_taken(bases: Iterable[str], cross_encoders: Iterable[str]) -> dict[str, str]:
    """Return the names that no adapter can have, and what has them."""
    return dict.fromkeys(cross_encoders, "a cross-encoder") | dict.fromkeys(bases, "a base model")


def _in_proportion(shares: Sequence[tuple[int, int]], whole: int) -> dict[int, int]:
    """Scale shares to a sum of `whole`; those that round to nothing are left out."""
    total, scaled = sum(share for _, share in shares), {}
    reached = given = 0
    # Rounding the cumulated shares, not each, keeps the sum.
    for number, share in shares:
        reached += share
        upto = round(whole * reached / total)
        if upto > given:
            scaled[number], given = upto - given, upto
    return scaled
