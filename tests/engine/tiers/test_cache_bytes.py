"""What copies beside a GPU's steps waits for, and what not; `test_mover` copies in both directions."""

from __future__ import annotations

import pytest
import torch

from engine.tiers.cache_bytes import CacheBytes, launched
from tests.engine.test_kv_cache import a_cache
from tests.simulated_gpu.device import in_order, simulate

DEVICE = torch.device("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="a device that is here is not simulated")
def test_copies_wait_for_what_was_launched_before_their_order_and_for_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch of a long fetch waited for all steps launched by then, for one after the other."""
    with in_order():
        gpu = simulate(monkeypatch)
        cache = a_cache(device="cuda")
        copies = CacheBytes(cache, DEVICE)
        steps = gpu.order.default
        cache.clear([1, 2])
        after, num_before = launched(DEVICE), steps.seen[steps.number]
        cache.clear([3])
        content = copies.read([1, 4], after)
        copies.write([2], [content[1]], after)
        assert copies._stream is not None
        assert copies._stream.stream.seen[steps.number] == num_before  # type: ignore[attr-defined]
        assert steps.seen[steps.number] > num_before


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    assert launched(torch.device("cpu")) is None
