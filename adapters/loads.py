"""How many adapters were loaded, and how long that took. Plain numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class AdapterLoads:
    """Adapters that were read into memory since the start; bytes and seconds of all together.

    Attributes:
        num_failed: attempts that ended in an error, other than those for adapters unloaded meanwhile.
        average_s: time of a load, later ones counting more; 0 before the first.
    """

    num_loaded: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    average_s: float = 0.0

    def add(self, num_bytes: int, seconds: float) -> None:
        """Count a load."""
        self.num_loaded += 1
        self.num_bytes += num_bytes
        self.seconds += seconds
        self.average_s = (self.average_s + seconds) / 2 if self.average_s else seconds
