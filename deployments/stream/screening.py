"""Holds an answer's text back until the safety classifier has judged the window that it stands in.

Pure. Windows are `window_chars` long and share `overlap_chars` with the next one, so that nothing hides on a border:

    text      |---------------------------------------- ...
    window 0  [0 ............ window)
    window 1           [stride ............ stride + window)      stride = window_chars - overlap_chars

A clean verdict on a window lets its text go up to where the next window begins; the shared end waits for the next
verdict. A flagged window therefore keeps all of its own text in, and all that follows.
"""

from __future__ import annotations

from collections import deque

from deployments.generation import Verdict


class OutputScreen:
    """The windows of one answer; verdicts come back in the order of the windows."""

    def __init__(self, *, window_chars: int, overlap_chars: int) -> None:
        self._window_chars = window_chars
        self._stride = window_chars - overlap_chars
        self._held = ""
        self._next_window = 0  # where the next window begins, counted from the beginning of the held text
        self._awaited: deque[int] = deque()  # characters to let go for each window that is out for judgement
        self._flagged: tuple[str, ...] = ()
        self._is_closed = False

    @property
    def flagged(self) -> tuple[str, ...]:
        """The hazards of the window that ended the text; empty as long as none did."""
        return self._flagged

    def feed(self, text: str) -> tuple[str, ...]:
        """Take text in and return the windows that it has filled, to be judged."""
        assert not self._is_closed, "text after the end"
        if self._flagged:
            return ()
        self._held += text
        windows = []
        # The character after a window shows that it is not the last one: the last one ends with the text.
        while len(self._held) > self._next_window + self._window_chars:
            windows.append(self._held[self._next_window : self._next_window + self._window_chars])
            self._awaited.append(self._stride)
            self._next_window += self._stride
        return tuple(windows)

    def close(self) -> tuple[str, ...]:
        """End the text and return its last window, to be judged; no window where there was no text."""
        self._is_closed = True
        if self._flagged or not self._held:
            return ()
        last = self._held[self._next_window :]
        self._awaited.append(len(last))
        self._next_window = len(self._held)
        return (last,)

    def release(self, verdict: Verdict) -> str:
        """Take the verdict on the oldest awaited window and return the text that may leave now."""
        num_chars = self._awaited.popleft()
        if verdict.flagged and not self._flagged:
            self._flagged = verdict.flagged
            self._held = ""
        if self._flagged:
            return ""
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._next_window -= num_chars
        return text
