"""Holds an answer's text back until the safety classifier has judged the window that contains it.

Pure. Windows are `window_chars` long and overlap by `overlap_chars`, so that nothing escapes at a boundary:

    text      |---------------------------------------- ...
    window 0  [0 ............ window)
    window 1           [stride ............ stride + window)      stride = window_chars - overlap_chars

A clean verdict releases the window's text up to the start of the next window; the overlap waits for the next verdict.
A flagged window therefore withholds all text that is still held, including everything after it.
"""

from __future__ import annotations

from collections import deque

from deployments.answer_events import Verdict


class OutputScreen:
    """The windows of one answer. Verdicts must arrive in the order of the windows.

    Attributes:
        flagged: the hazards of the window that ended the text; empty if none did.
    """

    def __init__(self, *, window_chars: int, overlap_chars: int) -> None:
        self._window_chars = window_chars
        self._stride = window_chars - overlap_chars
        self._held = ""
        self._next_window = 0  # start of the next window, relative to the start of the held text
        self._awaited: deque[int] = deque()  # characters to release for each window with a pending verdict
        self.flagged: tuple[str, ...] = ()

    def feed(self, text: str) -> tuple[str, ...]:
        """Append text and return the windows that are now full, to be judged."""
        if self.flagged:
            return ()
        self._held += text
        windows = []
        # Wait for a character beyond the window: it proves that the window is not the last, which ends with the text.
        while len(self._held) > self._next_window + self._window_chars:
            windows.append(self._held[self._next_window : self._next_window + self._window_chars])
            self._awaited.append(self._stride)
            self._next_window += self._stride
        return tuple(windows)

    def close(self) -> tuple[str, ...]:
        """End the text and return its last window, to be judged; nothing if no text is held. No `feed` may follow."""
        if not self._held:
            return ()
        last = self._held[self._next_window :]
        self._awaited.append(len(last))
        return (last,)

    def release(self, verdict: Verdict) -> str:
        """Apply the verdict on the oldest pending window and return the text that may be sent now."""
        num_chars = self._awaited.popleft()
        self.flagged = self.flagged or verdict.flagged
        if self.flagged:
            self._held = ""
        text, self._held = self._held[:num_chars], self._held[num_chars:]
        self._next_window -= num_chars
        return text
