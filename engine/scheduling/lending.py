"""Lends free cache blocks to adapters that find no room, and reclaims them when requests need them.

    free blocks --(adapters lacked room, half of the cache is free)--> lent --(a request finds no block)--> free

Adapters and requests share one pool, as in S-LoRA (Sheng et al., 2023, arXiv 2311.03285, section 5), but loans are runs
of adjacent blocks. The keys of one layer in a run are then a stretch long enough for a matrix, so that neither the
attention kernels nor the matrix products need to know of loans. Pure: standard library only; owned by the engine's
thread.
"""

from __future__ import annotations

from engine.config import ResolvedConfig
from engine.ports import AdapterGate
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.live_request import LiveRequest


class CacheLending:
    """Manages the loans. `engine.resolve` bounds them so that a request of maximum length always fits beside them."""

    def __init__(self, config: ResolvedConfig, tables: BlockTables, gate: AdapterGate) -> None:
        self._config = config
        self._tables = tables
        self._gate = gate

    def offer(self) -> None:
        """Lend one more run if adapters have lacked room and the cache can spare it."""
        count, most = self._config.lent_run_blocks, self._config.max_lent_blocks
        if not count or self._tables.num_lent + count > most or not self._gate.lacked_room():
            return
        run = self._tables.try_lend(count)
        if run is not None:
            self._gate.lend(run)

    def try_open(self, live: LiveRequest, *, spare: int) -> bool:
        """Open a request's tables (`BlockTables.try_open`), reclaiming lent blocks if there are too few free ones.

        Returns False at once for one that has just found no room beside others.
        """
        if spare and self._tables.found_no_room(live):
            return False
        while not self._tables.try_open(live, spare=spare):
            if not self._take_back():
                return False
        return True

    def try_extend(self, live: LiveRequest) -> bool:
        """Lengthen a request's tables (`BlockTables.try_extend`).

        If there are too few free blocks, reclaim lent ones, then those being fetched for a waiting request.
        """
        while not self._tables.try_extend(live):
            if not self._take_back() and not self._tables.tiers.give_up_one():
                return False
        return True

    def _take_back(self) -> bool:
        """Reclaim one run by evicting its adapters; False if running requests use adapters in every run."""
        run = self._gate.give_back() if self._tables.num_lent else None
        if run is None:
            return False
        self._tables.take_back(run)
        return True
