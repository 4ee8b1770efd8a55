"""The output that waits for one gateway, and when it is sent. Pure: takes the time as an argument, sends nothing.

    steps     |1 |2 |3 |4 |5 |6 |7 |8 |9        64 streams, a step every 10 ms
    frames    |1      |2-4       |5-7           spaced by 64 times 0.5 ms

A stream's part of a frame costs its readers (gateway, proxy, client) about the same however many tokens it has, and
with a small model more than sampling the tokens. So the next frame waits in proportion to the number of streams in the
last one; with few streams or slow steps, that is less than a step. An answer's first tokens and its end never wait.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from deployments.channel.token_frames import payload_bytes
from engine.request import Emission, RequestId

MAX_SPACING_S = 0.05
"""Upper bound for any number of streams, so that a reader sees text flow, not jump."""


class Outbox:
    """The output for one gateway that has not been sent yet.

    Args:
        spacing_s: seconds to wait before the next frame, per stream in the last one; 0 sends each step at once.
    """

    def __init__(self, spacing_s: float) -> None:
        self._spacing_s = spacing_s
        self._waiting: list[Emission] = []
        self._urgent: set[RequestId] = set()
        self._next_s = 0.0
        self.num_bytes = 0

    def put(self, emissions: Sequence[Emission], begun: Collection[RequestId] = ()) -> None:
        """Append a step's emissions; `begun` holds the requests whose first tokens are among them."""
        self._waiting.extend(emissions)
        self._urgent.update(e.request_id for e in emissions if e.finish_reason is not None or e.request_id in begun)
        self.num_bytes += sum(map(payload_bytes, emissions))

    def due_s(self) -> float | None:
        """Return when the next frame is due, on the clock of `take`; None if nothing waits."""
        if not self._waiting:
            return None
        return 0.0 if self._urgent else self._next_s

    def take(self, now_s: float) -> list[Emission]:
        """Remove and return what is to be sent now: everything if a frame is due, else only the urgent streams."""
        if now_s < self._next_s:
            taken = [e for e in self._waiting if e.request_id in self._urgent]
            self._waiting = [e for e in self._waiting if e.request_id not in self._urgent]
            self._urgent = set()
            self.num_bytes -= sum(map(payload_bytes, taken))
            return taken
        taken = self.take_all()
        num_streams = len({e.request_id for e in taken})
        self._next_s = now_s + min(MAX_SPACING_S, num_streams * self._spacing_s)
        return taken

    def take_all(self) -> list[Emission]:
        """Remove and return everything, whatever the time."""
        taken, self._waiting, self._urgent, self.num_bytes = self._waiting, [], set(), 0
        return taken
