from __future__ import annotations

from deployments.stream.stop_strings import StopStrings


def test_text_without_stop_strings_passes_at_once() -> None:
    assert StopStrings(()).feed("anything") == ("anything", None)


def test_a_stop_string_over_three_pieces_never_leaks() -> None:
    stops = StopStrings(["</end>"])
    assert [stops.feed(piece) for piece in ("yes</", "en", "d>no")] == [("yes", None), ("", None), ("", "</end>")]


def test_a_stop_string_that_is_kept_comes_out_once_it_is_complete() -> None:
    stops = StopStrings(["</end>"], is_kept=True)
    pieces = [stops.feed(piece) for piece in ("yes</", "en", "d>no", "no")]
    assert pieces == [("yes", None), ("", None), ("</end>", "</end>"), ("", None)]


def test_what_looked_like_a_stop_string_comes_out_once_it_is_none() -> None:
    stops = StopStrings(["</end>"])
    assert stops.feed("a</en") == ("a", None)
    assert stops._held == "</en"
    assert stops.feed("try>") == ("</entry>", None)
    assert stops._held == ""


def test_what_is_held_back_comes_out_at_the_end() -> None:
    stops = StopStrings(["\n\n"])
    assert stops.feed("line\n") == ("line", None)
    assert stops.close() == "\n"
    assert stops.close() == ""


def test_the_stop_string_that_is_complete_first_counts_not_the_one_that_begins_first() -> None:
    assert StopStrings(["abcd", "c"]).feed("abcd") == ("ab", "c")


def test_of_two_that_are_complete_together_the_longer_counts() -> None:
    assert StopStrings(["b", "ab"]).feed("xab") == ("x", "ab")


def test_nothing_comes_after_a_stop() -> None:
    stops = StopStrings(["."])
    assert stops.feed("end. more") == ("end", ".")
    assert stops.feed("more.") == ("", None)
    assert stops.close() == ""
