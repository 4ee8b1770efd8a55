"""How often a draft model guesses right for each adapter, so that each answer need not find out again. Pure."""

from __future__ import annotations

from adapters.identity import AdapterDigest

FIRST = 0.7
"""Acceptance rate that is assumed before anything is known."""
NEW_SHARE = 0.2
"""Weight of the newest step's acceptance rate."""
FORGOTTEN = 0.02
"""Share by which each new answer returns to the first assumption: where nothing is guessed, nothing is learned."""
MAX_ADAPTERS = 4096


class Agreement:
    """Acceptance rates by adapter, None for the base model; of those that were not asked for longest, none is kept."""

    def __init__(self) -> None:
        self._rate_by_adapter: dict[AdapterDigest | None, float] = {}

    def first(self, adapter: AdapterDigest | None) -> float:
        """Return the acceptance rate to expect of a new answer."""
        rate = self._rate_by_adapter.pop(adapter, FIRST)
        rate += FORGOTTEN * (FIRST - rate)
        self._rate_by_adapter[adapter] = rate
        if len(self._rate_by_adapter) > MAX_ADAPTERS:
            del self._rate_by_adapter[next(iter(self._rate_by_adapter))]
        return rate

    def learn(self, adapter: AdapterDigest | None, acceptance: float) -> None:
        """Record the acceptance rate that an answer has reached."""
        if adapter in self._rate_by_adapter:
            self._rate_by_adapter[adapter] += NEW_SHARE * (acceptance - self._rate_by_adapter[adapter])
