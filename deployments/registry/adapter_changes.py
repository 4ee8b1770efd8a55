"""What passes between the routes, gateways and the registry where adapters are changed. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from adapters.catalogue import AdapterEntry

Place = Literal["device", "host", "loading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A name, and the place whose content it shall stand for.

    Attributes:
        place: a folder, relative to one that adapters may be registered from, or absolute and inside of one; a URL
            that adapters may be fetched from, or an id of the hub.
        base: None where there is only one base model.
        replaces: whether a name that stands for something already gets a new version; else that is refused.
        takes_traffic: whether the name stands for it at once; else it can only be asked by its version.
    """

    name: str
    place: str
    base: str | None = None
    replaces: bool = False
    takes_traffic: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """A name, and where its contents lie now.

    Attributes:
        places_by_replica: of each version, by its number: where it lies on each replica that has it.
    """

    entry: AdapterEntry
    places_by_replica: Mapping[int, Mapping[str, Place]]
