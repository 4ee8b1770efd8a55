"""Blocks of the cache: their memory, and what is cleared, lent and copied of it."""

from __future__ import annotations

import pytest
import torch

from engine.cache.layout import CacheLayout, Place
from engine.decoder.model_spec import KvShape
from engine.errors import ConfigError
from engine.kv_cache import KvCache
from tests.kernels.conftest import resident_bytes

NUM_BLOCKS = 12


def a_cache(dtype: torch.dtype = torch.float32, *, by_block: bool = False, device: str = "cpu") -> KvCache:
    cache = KvCache(
        layout=CacheLayout.single(3),
        num_blocks=NUM_BLOCKS,
        block_tokens=4,
        kv_shapes=[KvShape(2, 8)] * 3,
        dtype=dtype,
        device=torch.device(device),
        by_block=by_block,
    )
    held = cache.data if dtype.is_floating_point and dtype.itemsize > 1 else cache.data.view(torch.int8)
    held.copy_(torch.randint(-100, 100, held.shape, generator=torch.Generator().manual_seed(1)).to(held.dtype))
    return cache


def test_clearing_takes_nan_from_a_block_in_all_layers() -> None:
    cache = a_cache(by_block=True)
    cache.data.fill_(torch.nan)
    cache.clear([3, 7])
    assert cache.data[:, :, [3, 7]].eq(0).all()
    assert cache.data[:, :, 4].isnan().all()
    cache.clear([])


def test_memory_that_there_is_not_is_refused_by_the_name_of_its_setting() -> None:
    with pytest.raises(ConfigError, match=r"^kv_cache_bytes: the system refuses \d{18} bytes: "):
        KvCache(
            layout=CacheLayout.single(3),
            num_blocks=1 << 48,
            block_tokens=4,
            kv_shapes=[KvShape(2, 8)] * 3,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
            by_block=True,
        )


def test_pages_are_the_memory_of_the_blocks_in_all_layers_and_of_no_other() -> None:
    cache = a_cache(torch.bfloat16)
    cache.data.zero_()
    pages = cache.pages(range(4, 8))
    assert [page.shape for page in pages] == [torch.Size([4 * 4 * 2 * 8 * 2])] * (2 * 3)
    for number, page in enumerate(pages, start=1):
        page.view(torch.bfloat16)[:] = number
    assert cache.data[:, :, [*range(4), *range(8, 13)]].eq(0).all()
    assert cache.data[:, :, 4:8].flatten(0, 1).flatten(1).eq(torch.arange(1, 2 * 3 + 1)[:, None]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("by_block", [False, True])
def test_layers_of_other_widths_lie_in_the_blocks_of_the_widest(dtype: torch.dtype, by_block: bool) -> None:
    """Layers of one place take it in turn, and what one of them writes to a block is in no other block."""
    shapes = [KvShape(2, 8), KvShape(1, 24), KvShape(3, 4)]
    cache = KvCache(
        layout=CacheLayout((0, 4), (Place(0, 0), Place(1, 0), Place(0, 1))),
        num_blocks=3,
        block_tokens=4,
        kv_shapes=shapes,
        dtype=dtype,
        device=torch.device("cpu"),
        by_block=by_block,
    )
    assert cache.data.shape == (2, 2, 4, 4, 24)
    for index, (heads, dim) in enumerate(shapes):
        layer = cache.layer(index)
        assert layer.k.shape == layer.v.shape == (4, 4, heads, dim)
        layer.k[index], layer.v[index] = 5, 7
        place = cache.layout.places[index].number
        assert int((cache.data[place, 0, index] == 5).sum()) == int((cache.data[place, 1, index] == 7).sum())
        assert int((cache.data[place, 0, index] == 5).sum()) == 4 * heads * dim
        assert (layer.spans is None) == dtype.is_floating_point
        for spans in layer.spans or ():
            assert spans.shape == (4, 4, heads)
    assert int((cache.data == 5).sum()) == 4 * sum(heads * dim for heads, dim in shapes)


def test_a_cache_takes_memory_for_the_tokens_that_came() -> None:
    """Layer by layer on huge pages, one block took one of them for the keys and one for the values of each layer."""
    cache = KvCache(
        layout=CacheLayout.single(32),
        num_blocks=4096,
        block_tokens=16,
        kv_shapes=[KvShape(1, 64)] * 32,
        dtype=torch.float32,
        device=torch.device("cpu"),
        by_block=True,
    )
    before = resident_bytes()
    cache.data[:, :, :16] = 1.0
    assert resident_bytes() - before < 16 << 20
    assert cache.data[:, :, 16:32].eq(0).all()


def test_memory_is_taken_ahead_once_and_what_lies_there_stays() -> None:
    cache = a_cache(by_block=True)
    before = cache.data.clone()
    while cache.touch(NUM_BLOCKS):
        pass
    assert not cache.touch(NUM_BLOCKS)
    assert torch.equal(cache.data, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("by_block", [False, True])
def test_a_cache_reads_and_writes_blocks_whole(dtype: torch.dtype, by_block: bool) -> None:
    cache = a_cache(dtype, by_block=by_block)
    if cache._spans is not None:
        cache._spans.uniform_()
    before = cache.data.view(torch.uint8).clone()
    read = cache.read([3, 5])
    assert read.shape == (2, cache.block_bytes)
    cache.write([8, 3], read)
    after = cache.data.view(torch.uint8)
    for block, source in {8: 3, 3: 5, 5: 5, 0: 0, NUM_BLOCKS: NUM_BLOCKS}.items():
        assert torch.equal(after[:, :, block], before[:, :, source])
    if cache._spans is not None:
        assert torch.equal(cache._spans[:, :, 3], cache._spans[:, :, 5])
