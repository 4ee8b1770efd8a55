"""Parse server-sent events on the client side: lines in, payloads out.

Source: HTML Living Standard, section 9.2.6 (interpreting an event stream). Fields other than `data` are ignored; an
event without its closing blank line is dropped, as the standard requires.
"""

from __future__ import annotations

DONE = "[DONE]"


class EventLines:
    """Assembles lines into event payloads."""

    def __init__(self) -> None:
        self._data: list[str] = []

    def feed(self, line: bytes) -> str | None:
        """Process one line, with or without its newline; return the payload of the event that it closes, or None."""
        text = line.rstrip(b"\r\n").decode("utf-8")
        if not text:
            payload = "\n".join(self._data) if self._data else None
            self._data.clear()
            return payload
        name, _, value = text.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))
        return None
