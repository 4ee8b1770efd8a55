"""Which layers share a block of the KV cache: those that look equally far back, so that what all have left is free.

    layer      0  1  2  3  4  5     w: looks back a window, f: to the beginning
               w  w  f  w  w  f
    table      1  1  0  2  2  0     as many layers to a table as there are of the rarest kind
    place      0  1  0  0  1  1

A block holds the keys and values of the layers of one table, at their places; blocks of all tables are of one size and
come from one pool (Kwon et al., 2023, arXiv 2309.06180, section 4, for one table; vLLM's hybrid KV cache for several).
Where all layers look equally far back there is one table, and a block holds all layers. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MAX_TABLES = 8
"""Each costs the host some time in every step."""
TILE_TOKENS = 128
"""Attention reads keys in aligned tiles of at most so many: of the first, what the window has left is read unseen."""


class Place(NamedTuple):
    """Where a layer's keys and values lie: in the blocks of which table, and behind how many other layers there."""

    table: int
    number: int


@dataclass(frozen=True)
class CacheLayout:
    """The tables of a model's cache.

    Attributes:
        windows: how many of the last positions the layers of each table see; 0 for all.
        places: of each layer.
    """

    windows: tuple[int, ...]
    places: tuple[Place, ...]

    @classmethod
    def single(cls, num_layers: int) -> CacheLayout:
        """Return the layout of one table, which keeps everything."""
        return cls((0,), tuple(Place(0, index) for index in range(num_layers)))

    @classmethod
    def of(cls, windows: Sequence[int]) -> CacheLayout:
        """Return the layout for layers with such windows, 0 for none."""
        num_by_window = Counter(windows)
        size = min(num_by_window.values())
        while sum(-(-count // size) for count in num_by_window.values()) > MAX_TABLES:
            size += 1
        tables: list[int] = []
        place_by_layer: dict[int, Place] = {}
        for window in sorted(num_by_window):
            layers = [layer for layer, own in enumerate(windows) if own == window]
            for start in range(0, len(layers), size):
                for number, layer in enumerate(layers[start : start + size]):
                    place_by_layer[layer] = Place(len(tables), number)
                tables.append(window)
        return cls(tuple(tables), tuple(place_by_layer[layer] for layer in range(len(windows))))

    @cached_property
    def num_places(self) -> int:
        """Layers that a block has room for."""
        return 1 + max(place.number for place in self.places)
