from __future__ import annotations

from deployments.answer_events import Verdict
from deployments.stream.screening import OutputScreen

CLEAN = Verdict(score_by_hazard={"hate": 0.1}, flagged=())
FOUND = Verdict(score_by_hazard={"hate": 0.9}, flagged=("hate",))


def test_text_waits_for_the_verdict_on_its_window() -> None:
    screen = OutputScreen(window_chars=4, overlap_chars=1)
    assert screen.feed("abcd") == ()
    assert screen.feed("e") == ("abcd",)
    assert screen.release(CLEAN) == "abc"
    assert screen.close() == ("de",)
    assert screen.release(CLEAN) == "de"


def test_nothing_of_a_flagged_window_leaves_nor_of_what_follows() -> None:
    screen = OutputScreen(window_chars=4, overlap_chars=2)
    assert screen.feed("abcdefg") == ("abcd", "cdef")
    assert screen.release(CLEAN) == "ab"
    assert screen.release(FOUND) == ""
    assert screen.flagged == ("hate",)
    assert screen.feed("more") == ()
    assert screen.close() == ()


def test_a_clean_verdict_that_was_out_when_a_window_was_flagged_lets_nothing_go() -> None:
    screen = OutputScreen(window_chars=2, overlap_chars=0)
    assert screen.feed("abcde") == ("ab", "cd")
    assert [screen.release(FOUND), screen.release(CLEAN)] == ["", ""]


def test_the_first_window_that_is_flagged_says_why() -> None:
    screen = OutputScreen(window_chars=2, overlap_chars=0)
    assert screen.feed("abcde") == ("ab", "cd")
    screen.release(FOUND)
    screen.release(Verdict(score_by_hazard={}, flagged=("violence",)))
    assert screen.flagged == ("hate",)


def test_a_short_text_is_one_window() -> None:
    screen = OutputScreen(window_chars=200, overlap_chars=50)
    assert screen.feed("short") == ()
    assert screen.close() == ("short",)
    assert screen.release(CLEAN) == "short"


def test_no_text_is_no_window() -> None:
    screen = OutputScreen(window_chars=200, overlap_chars=50)
    assert screen.close() == ()
