from __future__ import annotations

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from deployments.answer_events import Verdict
from deployments.stream.screening import OutputScreen


def verdict_on(window: str) -> Verdict:
    return Verdict(score_by_hazard={}, flagged=("found",) if "!" in window else ())


@given(
    window=st.integers(1, 8),
    overlap=st.integers(0, 7),
    pieces=st.lists(st.text("abc!", max_size=9), max_size=8),
    max_out=st.integers(0, 3),
)
def test_all_of_a_clean_text_and_nothing_of_a_flagged_window_leaves(
    window: int, overlap: int, pieces: list[str], max_out: int
) -> None:
    overlap %= window
    screen = OutputScreen(window_chars=window, overlap_chars=overlap)
    text, seen, out, waiting = "".join(pieces), [], "", deque[str]()
    for piece in [*pieces, None]:
        windows = screen.close() if piece is None else screen.feed(piece)
        seen.extend(windows)
        waiting.extend(windows)
        while len(waiting) > (0 if piece is None else max_out):
            out += screen.release(verdict_on(waiting.popleft()))
    assert all(len(part) <= window for part in seen)
    assert text.startswith(out)
    if "!" in text:
        assert screen.flagged == ("found",)
        # The mark and the whole window that showed it stay in.
        stride = window - overlap
        flagged = next(i for i, part in enumerate(seen) if "!" in part)
        assert out == text[: flagged * stride]
    else:
        assert out == text
        assert screen.flagged == ()


@given(window=st.integers(1, 8), overlap=st.integers(0, 7), text=st.text("abc", max_size=40))
def test_every_passage_as_long_as_the_overlap_stands_whole_in_a_window(window: int, overlap: int, text: str) -> None:
    overlap %= window
    screen = OutputScreen(window_chars=window, overlap_chars=overlap)
    windows = [*screen.feed(text), *screen.close()]
    for start in range(len(text) - overlap):
        assert any(text[start : start + overlap + 1] in part for part in windows)
