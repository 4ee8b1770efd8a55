"""Cuts streamed text before the first stop string, and never emits part of one.

Pure. The first stop string is the one completed first (of two completed at the same character, the longer), so that the
result does not depend on how the text was split into pieces.
Each stop string has its own Knuth-Morris-Pratt automaton: amortized O(1) per character and stop string.
**Source:** Knuth, Morris, Pratt, "Fast pattern matching in strings", SIAM J. Comput. 6 (1977).
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Matches stop strings, none of them empty, in one text.

    Attributes:
        is_deaf: a stop string that is completed in fed text is ignored; its beginning may lie in such text.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.is_deaf = False
        self._automata = [_Automaton(stop) for stop in stops]
        self._held = ""
        self._is_closed = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certain to precede any stop string, and the stop string that was found, or None.

        A match closes the text: anything fed later is dropped.
        """
        if self._is_closed or not text:
            return "", None
        if not self._automata:
            return text, None
        ends = [(automaton.advance(text, is_deaf=self.is_deaf), automaton.stop) for automaton in self._automata]
        found = [(end, -len(stop), stop) for end, stop in ends if end is not None]
        buffer = self._held + text
        if found:
            end, minus_length, stop = min(found)
            self._is_closed, self._held = True, ""
            return buffer[: len(buffer) - len(text) + end + minus_length], stop
        num_safe = len(buffer) - max(automaton.num_matched for automaton in self._automata)
        self._held = buffer[num_safe:]
        return buffer[:num_safe], None

    def close(self) -> str:
        """Return the text held back: with no more text to come, it cannot become a stop string."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """Tracks the longest prefix of one stop string that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        # borders[i]: length of the longest proper prefix of stop[:i] that is also its suffix.
        self._borders = [0, 0]
        for char in stop[1:]:
            self._borders.append(self._follow(self._borders[-1], char))

    def advance(self, text: str, *, is_deaf: bool) -> int | None:
        """Consume text; return the position after the first complete match in it, or None, as always if `is_deaf`."""
        position, matched = 0, self.num_matched
        while position < len(text):
            if matched == 0:
                position = text.find(self.stop[0], position)
                if position < 0:
                    break
            matched = self._follow(matched, text[position])
            position += 1
            if matched == len(self.stop):
                if not is_deaf:
                    return position
                matched = self._borders[matched]
        self.num_matched = matched
        return None

    def _follow(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._borders[matched]
        return matched + 1 if self.stop[matched] == char else 0
