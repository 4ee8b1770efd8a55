"""How long a block of a tier takes to be fetched, by recent fetches."""

from __future__ import annotations

import math
import time

NEW_SHARE = 0.2
"""Weight of the newest measurement in the expected time per block."""
MAX_SURPRISE = 4.0
"""A measurement counts as at most this many times the expected time: a disk may have been asleep."""
HALVING_S = 10.0
"""Half-life of the expected time: without new fetches, nothing else would correct an estimate that is too high."""


class BlockTime:
    """The expected time per block; any thread may learn or ask."""

    def __init__(self) -> None:
        self._block_s = self._measured_at_s = 0.0

    @property
    def expected_s(self) -> float:
        """Seconds per block; 0 before the first measurement."""
        return self._block_s * self._memory()

    def learn(self, block_s: float) -> None:
        """Note a measurement."""
        if self._block_s:
            # The old estimate's weight decays, but its undecayed value caps the new time: a decayed cap comes too low.
            old_share = (1 - NEW_SHARE) * self._memory()
            block_s = old_share * self._block_s + (1 - old_share) * min(block_s, MAX_SURPRISE * self._block_s)
        self._block_s, self._measured_at_s = block_s, time.monotonic()

    def _memory(self) -> float:
        """Return the share of the estimate that has not decayed."""
        return math.exp2((self._measured_at_s - time.monotonic()) / HALVING_S)
