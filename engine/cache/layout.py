"""Which layers share a block of the KV cache: those with equal windows, so that all of them are done with it at once.

    layer      0  1  2  3  4  5     w: sliding window, f: full attention
               w  w  f  w  w  f
    table      1  1  0  2  2  0     as many layers per table as the rarest kind has
    place      0  1  0  0  1  1

A block holds the keys and values of the layers of one table, at their places; blocks of all tables are of one size and
come from one pool (Kwon et al., 2023, arXiv 2309.06180, section 4, for one table; vLLM's hybrid KV cache for several).
If all layers have the same window, there is one table, and a block holds all layers. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

MAX_TABLES = 8
"""Each table costs the host some time in every step."""
TILE_TOKENS = 128
"""Attention reads keys in aligned tiles of at most this many; the first may begin before the window, masked there."""


class Place(NamedTuple):
    """Location of a layer's keys and values: the table, and the number of layers before it in a block."""

    table: int
    number: int


@dataclass(frozen=True)
class CacheLayout:
    """The tables of a model's cache.

    Attributes:
        windows: how many of the last positions the layers of each table see; 0 for all.
        places: the place of each layer.
    """

    windows: tuple[int, ...]
    places: tuple[Place, ...]

    @classmethod
    def single(cls, num_layers: int) -> CacheLayout:
        """Return the layout of a single table with full attention."""
        return cls((0,), tuple(Place(0, index) for index in range(num_layers)))

    @classmethod
    def of(cls, windows: Sequence[int]) -> CacheLayout:
        """Return the layout for the windows of all layers, 0 for full attention."""
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
        """Number of layers that a block has room for."""
        return 1 + max(place.number for place in self.places)
