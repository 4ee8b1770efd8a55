"""Benchmark of moving KV cache blocks to host memory and back, against a plain copy over the bus."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from engine.cache.blocks import BlockId
from engine.cache.layout import CacheLayout
from engine.cache.prefix_index import BlockName
from engine.decoder.model_spec import KvShape
from engine.kv_cache import KvCache
from engine.ports import BlockOrder
from engine.tiers.host_slots import HostSlots
from engine.tiers.mover import TierMover
from loadtest.gpu.sizes import Geometry

BLOCK_TOKENS, NUM_LAYERS = 16, 32
POLL_S = 1e-4
REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TierFigure:
    """Bytes per second in one direction, and of a plain copy of as much page-locked memory in the same direction."""

    name: str
    bytes_per_s: float
    plain_bytes_per_s: float


def measure(geometry: Geometry, device: torch.device, num_blocks: int) -> Iterator[TierFigure]:
    """Time storing and then fetching `num_blocks` blocks.

    Raises:
        RuntimeError: a block was lost, or its content came back changed.
    """
    cache = KvCache(
        layout=CacheLayout.single(NUM_LAYERS),
        num_blocks=2 * num_blocks,
        block_tokens=BLOCK_TOKENS,
        kv_shapes=[KvShape(geometry.kv_heads, geometry.head_dim)] * NUM_LAYERS,
        dtype=torch.bfloat16,
        device=device,
    )
    cache.data.normal_()
    host = HostSlots(num_blocks, cache.block_bytes, is_pinned=device.type == "cuda")
    arrived = threading.Event()
    mover = TierMover(cache, [host], device, arrived.set)
    names = [BlockName(number.to_bytes(32, "little")) for number in range(num_blocks)]
    down = [BlockOrder(BlockId(number), name, number, 0, number) for number, name in enumerate(names)]
    up = [BlockOrder(BlockId(num_blocks + number), name, number, 0, number) for number, name in enumerate(names)]

    def store() -> None:
        mover.store(down)
        left = len(down)
        while left:
            left -= len(mover.stored())
            time.sleep(POLL_S)

    def fetch() -> None:
        arrived.clear()
        mover.fetch(1, up)
        arrived.wait()
        if mover.fetched() != [(1, num_blocks)]:
            raise RuntimeError("blocks were lost")

    pinned = torch.empty(num_blocks * cache.block_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    on_device = torch.empty_like(pinned, device=device)
    for name, run, plain in (
        ("blocks to the host", store, lambda: pinned.copy_(on_device)),
        ("blocks from the host", fetch, lambda: on_device.copy_(pinned)),
    ):
        rate, plain_rate = (pinned.nbytes / _seconds(one, device) for one in (run, plain))
        yield TierFigure(name=name, bytes_per_s=rate, plain_bytes_per_s=plain_rate)
    mover.close()
    if not torch.equal(cache.data[:, :, :num_blocks], cache.data[:, :, num_blocks : 2 * num_blocks]):
        raise RuntimeError("blocks did not come back as they were")


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the shortest time of `REPEATS` runs, after one warm-up."""
    found = []
    for _ in range(REPEATS + 1):
        started_s = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - started_s)
    return min(found[1:])
