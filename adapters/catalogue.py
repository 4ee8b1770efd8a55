"""What names of adapters stand for: versions of each name, and how its traffic is split among them. Pure.

sql            the versions that the split names, by their percentages
sql@3          version 3
sql@latest     the newest version that is not on trial
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from adapters.identity import AdapterRef

LATEST = "latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterVersion:
    """One content that a name stands or stood for; `created_s` is Unix time.

    Attributes:
        is_on_trial: it came without traffic and has had none yet; it can be asked by its number only.
    """

    number: int
    ref: AdapterRef
    created_s: int
    is_on_trial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterEntry:
    """A name.

    Attributes:
        base: name of the base model.
        versions: oldest first, at least one.
        split: version and percentage of the name's traffic; the percentages make 100. Empty while nothing but its
            versions can be asked: the first of them is on trial.
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

    def heir(self, number: int) -> int | None:
        """Return the version that takes over the share of another that is removed; None where there is none to take."""
        left = [v.number for v in self.versions if v.number != number and not v.is_on_trial]
        return max(left) if left and number in dict(self.split) else None

    def pick(self, draw: float) -> AdapterVersion:
        """Return the version that a request gets; `draw` is uniform in [0, 1)."""
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
        store: identity of the store that tells of them.
        revision: of this store; grows with every change.
    """

    store: str = ""
    revision: int = 0
    entries: Mapping[str, AdapterEntry] = field(default_factory=dict)

    def find(self, name: str, draw: float) -> tuple[AdapterEntry, AdapterVersion] | None:
        """Return what a public name stands for, None where it is not that of an adapter."""
        alias, mark, wanted = name.partition("@")
        entry = self.entries.get(alias)
        if entry is None:
            return None
        if not mark:
            return (entry, entry.pick(draw)) if entry.split else None
        if wanted == LATEST:
            return None if entry.latest is None else (entry, entry.latest)
        # By its spelling: nobody is to be asked for, and counted, under several names.
        version = next((version for version in entry.versions if str(version.number) == wanted), None)
        return None if version is None else (entry, version)

    def replaces(self, other: Catalogue) -> bool:
        """Whether this is to be believed rather than another: it is of another store, or not older."""
        return self.store != other.store or self.revision >= other.revision

    def digests(self) -> frozenset[str]:
        """Return every content that some name stands for."""
        return frozenset(version.ref.digest for entry in self.entries.values() for version in entry.versions)

    def gone(self, name: str, before: Catalogue) -> tuple[AdapterRef, ...]:
        """Return the contents of a name's versions of before that no name of their base model stands for any more."""
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
