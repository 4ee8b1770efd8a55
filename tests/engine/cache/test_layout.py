"""Layers that look equally far back share blocks, all of one size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.cache.layout import MAX_TABLES, CacheLayout, Place


def test_layers_that_are_alike_share_one_table() -> None:
    assert CacheLayout.of([0, 0, 0]) == CacheLayout.single(3)
    assert CacheLayout.of([9, 9]) == CacheLayout((9,), (Place(0, 0), Place(0, 1)))


def test_five_layers_of_six_with_a_window() -> None:
    """Gemma 3 of 12 billion weights: 48 layers, 8 of which see everything."""
    layout = CacheLayout.of([1024] * 5 * 8 + [0] * 8)
    assert layout.windows == (0, *[1024] * 5)
    assert layout.num_places == 8
    assert layout.places[0] == (1, 0)
    assert layout.places[47] == (0, 7)


def test_every_other_layer_with_a_window() -> None:
    layout = CacheLayout.of([128, 0] * 12)
    assert (layout.windows, layout.num_places) == ((0, 128), 12)
    assert layout.places[:4] == (Place(1, 0), Place(0, 0), Place(1, 1), Place(0, 1))


def test_there_are_as_many_tables_as_may_be_before_places_stay_empty() -> None:
    assert CacheLayout.of([0] + [9] * (MAX_TABLES - 1)).num_places == 1
    assert CacheLayout.of([0] + [9] * MAX_TABLES).num_places == 2


@given(st.lists(st.sampled_from([0, 0, 8, 8, 20]), min_size=1, max_size=60))
def test_every_layer_has_a_place_of_its_own_in_a_table_of_its_window(windows: list[int]) -> None:
    layout = CacheLayout.of(windows)
    assert len(set(layout.places)) == len(layout.places) == len(windows)
    assert [layout.windows[place.table] for place in layout.places] == windows
    assert all(0 <= place.number < layout.num_places for place in layout.places)
    assert len(layout.windows) <= MAX_TABLES
    assert {place.table for place in layout.places} == set(range(len(layout.windows)))
    # What sees everything comes first, and its names are those that replicas tell each other.
    assert layout.windows == tuple(sorted(layout.windows))
