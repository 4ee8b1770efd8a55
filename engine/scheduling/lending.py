"""Lends free blocks of the cache to adapters that find no room, and takes them back where requests need them.

    free blocks --(adapters lacked room, half of the cache is free)--> lent --(a request finds no block)--> free

One pool for both, as in S-LoRA (Sheng et al., 2023, arXiv 2311.03285, section 5), but in runs of neighbours: a stretch
of a layer's keys is then as long as a matrix needs, and neither attention nor products learn of it. Pure: standard
library only; the engine's thread owns it.
"""

from __future__ import annotations

from engine.cache.block_tables import BlockTables
from engine.config import ResolvedConfig
from engine.ports import AdapterGate
from engine.scheduling.live_request import LiveRequest


class CacheLending:
    """What of the cache is lent. A request of full length always fits beside: `engine.resolve` bounds the loans."""

    def __init__(self, config: ResolvedConfig, tables: BlockTables, gate: AdapterGate) -> None:
        self._config = config
        self._tables = tables
        self._gate = gate

    def offer(self) -> None:
        """Lend one run more where adapters have lacked room and the cache has it to spare."""
        count, most = self._config.lent_run_blocks, self._config.max_lent_blocks
        if not count or self._tables.num_lent + count > most or not self._gate.lacked_room():
            return
        run = self._tables.try_lend(count)
        if run is not None:
            self._gate.lend(run)

    def try_open(self, live: LiveRequest, *, spare: int) -> bool:
        """Open a request's table (`BlockTables.try_open`), with blocks that were lent where others do not do."""
        while not self._tables.try_open(live, spare=spare):
            if not self._take_back():
                return False
        return True

    def try_extend(self, live: LiveRequest) -> bool:
        """Lengthen a request's table (`BlockTables.try_extend`).

        Where others do not do, it gets blocks that were lent, or that are being filled for somebody who waits.
        """
        while not self._tables.try_extend(live):
            if not self._take_back() and not self._tables.tiers.give_up_one():
                return False
        return True

    def _take_back(self) -> bool:
        """Have idle adapters leave one run; False where there is none that running requests leave alone."""
        run = self._gate.give_back() if self._tables.num_lent else None
        if run is None:
            return False
        self._tables.take_back(run)
        return True
