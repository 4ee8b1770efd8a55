"""How much work each adapter causes, so that a hot one gets several replicas and a cold one few. Pure."""

from __future__ import annotations

import math
from collections import OrderedDict

MEMORY_S = 30.0
"""Time constant of the exponential decay of a request's work."""
FULL_SHARE = 0.5
"""An adapter that keeps a replica busy for this share of the time gets one more."""
MAX_ADAPTERS = 4096


class AdapterDemand:
    """Replica-seconds per second that adapters demand; beyond `MAX_ADAPTERS` the least recently used is forgotten."""

    def __init__(self) -> None:
        self._by_adapter: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def note(self, adapter: int, work_s: float, now_s: float) -> None:
        """Count one request that keeps a replica busy for `work_s`."""
        self._by_adapter[adapter] = (self.share(adapter, now_s) + work_s / MEMORY_S, now_s)
        self._by_adapter.move_to_end(adapter)
        if len(self._by_adapter) > MAX_ADAPTERS:
            self._by_adapter.popitem(last=False)

    def share(self, adapter: int, now_s: float) -> float:
        """Return how many replicas the adapter keeps busy: 0.5 is one replica half of the time."""
        share, at_s = self._by_adapter.get(adapter, (0.0, now_s))
        return share * math.exp((at_s - now_s) / MEMORY_S)

    def num_homes(self, adapter: int, now_s: float, num_gateways: int) -> int:
        """Return how many home replicas the adapter gets, assuming that each gateway sees the same demand."""
        return 1 + int(self.share(adapter, now_s) * num_gateways / FULL_SHARE)
