"""The tier in memory: slots side by side, over more pieces of memory than one."""

from __future__ import annotations

import pytest
import torch

from engine.cache.prefix_index import BlockName
from engine.tiers import host_slots
from engine.tiers.host_slots import HostSlots


@pytest.mark.parametrize("piece_bytes", [1, 24, 50, 1 << 20])
def test_each_slot_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr(host_slots, "PIECE_BYTES", piece_bytes)
    slots = HostSlots(7, 24, is_pinned=False)
    name = BlockName(bytes(32))
    for slot in range(7):
        slots.write(slot, name, 0, torch.full((24,), slot, dtype=torch.uint8))
    for slot in range(7):
        found = slots.read(slot, name)
        assert found is not None
        assert found.tolist() == [slot] * 24
    assert not slots.contents()
    slots.close()
