from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.stream.stop_strings import StopStrings

# Few letters, so that stop strings begin within each other all the time.
TEXT = st.text("ab", max_size=14)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=3)


def naive_cut(stops: list[str], text: str, num_deaf: int = 0) -> tuple[str, str | None]:
    """Grow the text by one character at a time and look whether it ends in a stop string."""
    for end in range(num_deaf + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def fed(stops: list[str], pieces: list[str]) -> tuple[str, str | None, list[str]]:
    parser, text, matched, held = StopStrings(stops), "", None, []
    for piece in pieces:
        safe, found = parser.feed(piece)
        text, matched = text + safe, matched or found
        held.append(parser._held)
    return text + parser.close(), matched, held


@given(stops=STOPS, text=TEXT, places=st.lists(st.integers(0, 14), max_size=5))
@settings(deadline=None)
def test_the_text_ends_before_the_first_stop_string_whatever_the_pieces(
    stops: list[str], text: str, places: list[int]
) -> None:
    edges = [0, *sorted(min(place, len(text)) for place in places), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
    cut, matched, held = fed(stops, pieces)
    assert (cut, matched) == naive_cut(stops, text)
    longest = max(map(len, stops), default=1)
    assert all(len(part) < longest for part in held)


@given(stops=STOPS, text=TEXT)
@settings(deadline=None)
def test_every_split_in_two_gives_the_same(stops: list[str], text: str) -> None:
    for place in range(len(text) + 1):
        assert fed(stops, [text[:place], text[place:]])[:2] == naive_cut(stops, text)


@given(stops=STOPS, text=TEXT, num_deaf=st.integers(0, 14))
@settings(deadline=None)
def test_a_stop_string_that_ends_where_none_may_is_ignored(stops: list[str], text: str, num_deaf: int) -> None:
    """One that began there and ended behind was ignored, too."""
    parser = StopStrings(stops)
    parser.is_deaf = True
    safe, found = parser.feed(text[:num_deaf])
    assert found is None
    parser.is_deaf = False
    more, found = parser.feed(text[num_deaf:])
    assert (safe + more + parser.close(), found) == naive_cut(stops, text, num_deaf)


@given(stops=STOPS.filter(bool), text=TEXT)
@settings(deadline=None)
def test_only_the_beginning_of_a_stop_string_is_held_back(stops: list[str], text: str) -> None:
    parser = StopStrings(stops)
    _, matched = parser.feed(text)
    held = parser._held
    assert held == "" if matched else any(stop.startswith(held) and stop != held for stop in stops)
