"""Values exchanged between routes, gateways and the registry to change adapters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from adapters.catalogue import AdapterEntry

Place = Literal["device", "host", "loading"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """A request to register the content of a place under a name.

    Attributes:
        place: a folder, relative to a permitted root or absolute and inside one; a permitted URL; or a hub id.
        base: None if there is only one base model.
        replaces: if the name already serves a content, add a new version; otherwise such a name is refused.
        percent: share of the name's traffic to route to it, 0 to 100; with 0 it is reachable only by its version.
        is_tried: it gets no traffic until `admit` ends its trial; `withdraw` removes it.
    """

    name: str
    place: str
    base: str | None = None
    replaces: bool = False
    percent: int = 100
    is_tried: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """An adapter name and where its contents currently reside.

    Attributes:
        places_by_replica: by version number, then by replica: the version's place on each replica that has it.
        misfits: by version number: why the version does not fit its base model, which has another checkpoint now.
        shadowed_by: what has the adapter's name now, so that no request reaches the adapter; None if nothing has.
    """

    entry: AdapterEntry
    places_by_replica: Mapping[int, Mapping[str, Place]]
    misfits: Mapping[int, str] = field(default_factory=dict)
    shadowed_by: str | None = None
