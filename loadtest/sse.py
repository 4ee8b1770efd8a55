"""Server-sent events as a client reads them: lines in, payloads out, nothing guessed.

Source: HTML Living Standard, section 9.2.6 (interpreting an event stream). Fields other than `data` are ignored; an
event that its blank line does not close is dropped, as the standard asks.
"""

from __future__ import annotations

DONE = "[DONE]"


class EventLines:
    """Gathers lines into payloads."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: bytes) -> str | None:
        """Take one line, with or without its end, and return the payload of the event that it closes, or None."""
        text = line.rstrip(b"\r\n").decode("utf-8")
        if not text:
            payload = "\n".join(self._data) if self._data else None
            self._data.clear()
            return payload
        name, _, value = text.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None
