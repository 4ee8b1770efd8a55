"""Pins adapters for the requests that one plan admits."""

from __future__ import annotations

from collections.abc import Callable

from adapters.identity import AdapterDigest
from engine.ports import AdapterGate
from engine.scheduling.live_request import LiveRequest

MAX_SKIPS = 64
"""A request skipped more often than this because pinned adapters leave its own no slot, or no memory to be loaded into,
gets the next that is free."""


def is_ready(gate: AdapterGate, is_coming: Callable[[LiveRequest], bool], live: LiveRequest) -> bool:
    """Return whether a waiting request could run now: its adapter can be pinned, and it awaits no fetch."""
    if is_coming(live):
        return False
    adapter = live.request.adapter
    if adapter is None:
        return True
    is_pinned = gate.try_pin(adapter)
    if is_pinned:
        gate.unpin(adapter)
    return is_pinned


class Pins:
    """The adapters that one plan pins for admissions; an adapter that cannot be pinned is tried only once."""

    def __init__(self, gate: AdapterGate) -> None:
        self._gate = gate
        self._is_reserved = False
        self._wants_slot_by_refused: dict[AdapterDigest, bool] = {}

    def try_pin(self, live: LiveRequest) -> bool:
        """Pin the adapter of a request about to be admitted; always True for the base model."""
        adapter = live.request.adapter
        if adapter is None:
            return True
        if adapter not in self._wants_slot_by_refused:
            if not self._is_reserved and self._gate.try_pin(adapter):
                return True
            self._wants_slot_by_refused[adapter] = self._gate.waits_for_slot(adapter)
        live.num_skips += self._wants_slot_by_refused[adapter]
        self._is_reserved = self._is_reserved or live.num_skips > MAX_SKIPS
        return False

    def undo(self, live: LiveRequest) -> None:
        """Undo the pin of a request that was not admitted after all."""
        if live.request.adapter is not None:
            self._gate.unpin(live.request.adapter)
