"""Cuts streamed text before the first stop string, or behind it, and never emits part of one before it is complete.

Pure. The first stop string is the one completed first (of two completed at the same character, the longer), so that the
result does not depend on how the text was split into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence

from deployments.stream.reasoning import overlap


class StopStrings:
    """Matches stop strings, none of them empty, in one text.

    Args:
        is_kept: the text ends behind the stop string, not before it.

    Attributes:
        is_deaf: a stop string that is completed in fed text is ignored; its beginning may lie in such text.
    """

    def __init__(self, stops: Sequence[str], *, is_kept: bool = False) -> None:
        self.is_deaf = False
        self._is_kept = is_kept
        self._stops = stops
        self._held = ""
        self._is_closed = False

    def feed(self, text: str) -> tuple[str, str | None]:
        """Return the text that is certain to precede any stop string, and the stop string that was found, or None.

        A match closes the text: anything fed later is dropped.
        """
        if self._is_closed or not text:
            return "", None
        if not self._stops:
            return text, None
        buffer, num_held = self._held + text, len(self._held)
        # What ends in the held text was found before, or ignored.
        places = () if self.is_deaf else ((buffer.find(s, max(0, num_held + 1 - len(s))), s) for s in self._stops)
        found = [(place + len(stop), -len(stop), stop) for place, stop in places if place >= 0]
        if found:
            end, minus_length, stop = min(found)
            self._is_closed, self._held = True, ""
            return buffer[: end if self._is_kept else end + minus_length], stop
        num_safe = len(buffer) - max([overlap(buffer, stop) for stop in self._stops])
        self._held = buffer[num_safe:]
        return buffer[:num_safe], None

    def close(self) -> str:
        """Return the text held back: with no more text to come, it cannot become a stop string."""
        held, self._held = self._held, ""
        return held
