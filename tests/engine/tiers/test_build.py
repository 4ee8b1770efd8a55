"""Which tiers a configuration opens, and whose content an engine takes for its own."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.config import ResolvedConfig
from engine.kv_cache import KvCache
from engine.loading import fingerprint
from engine.ports import BlockOrder
from engine.tiers.build import open_tiers
from engine.tiers.mover import TierMover
from tests.engine.scripted import a_config
from tests.engine.test_kv_cache import a_cache
from tests.engine.tiers.test_mover import a_name


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")
    return folder


def config_of(model: Path, cache: KvCache, **fields: Any) -> ResolvedConfig:
    fields = {"kv_disk_bytes": 8 * cache.block_bytes, "kv_disk_folder": str(model.parent / "kv")} | fields
    return a_config(model_path=str(model), **fields)


def opened(config: ResolvedConfig, cache: KvCache, *, outlives: bool = True) -> TierMover:
    mover = open_tiers(config, cache, lambda: None, outlives=outlives)
    assert mover is not None
    return mover


def store_one(mover: TierMover) -> None:
    (tier,) = mover._tiers
    tier.write(0, a_name(1), 0, torch.zeros(mover._up[0]._cache.block_bytes, dtype=torch.uint8))
    mover.close()


def num_kept(mover: TierMover) -> int:
    kept = sum(map(len, mover.contents()))
    mover.close()
    return kept


def test_nothing_is_opened_that_nobody_asks_for() -> None:
    assert open_tiers(a_config(), a_cache(), lambda: None, outlives=True) is None


def test_a_full_disk_is_no_reason_not_to_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    cache = a_cache()
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", fail)
        assert open_tiers(config_of(model, cache), cache, lambda: None, outlives=True) is None
    # The file is not locked any more.
    store_one(opened(config_of(model, cache), cache))
    assert len(list((model.parent / "kv").iterdir())) == 1


def test_the_host_comes_before_the_disk(model: Path) -> None:
    cache = a_cache()
    mover = opened(config_of(model, cache, kv_host_bytes=3 * cache.block_bytes + 1), cache)
    assert [*mover.capacities] == [3, 8]
    mover.store([BlockOrder(1, a_name(1), 0, 1, 0)])  # type: ignore[arg-type]
    mover.close()


def test_what_was_kept_is_found_by_the_same_weights_computed_alike(model: Path) -> None:
    cache = a_cache()
    config = config_of(model, cache)
    store_one(opened(config, cache))
    assert num_kept(opened(config, cache)) == 1


def test_other_weights_or_numbers_find_nothing(model: Path) -> None:
    cache = a_cache()
    config = config_of(model, cache)
    store_one(opened(config, cache))
    # With windows other layers share a block.
    for fields in ({"dtype": "bfloat16"}, {"windows": (0, 32)}, {"block_tokens": 8}, {"quantization": "int8"}):
        assert num_kept(opened(config_of(model, cache, **fields), cache)) == 0
    # Each has a file of its own: the one is still there.
    assert num_kept(opened(config, cache)) == 1
    save_file({"w": torch.zeros(4)}, model / "model.safetensors")
    assert num_kept(opened(config, cache)) == 0


def test_weights_from_elsewhere_are_nobody_elses(model: Path) -> None:
    cache = a_cache()
    config = config_of(model, cache)
    store_one(opened(config, cache, outlives=False))
    assert num_kept(opened(config, cache, outlives=False)) == 0
    assert num_kept(opened(config, cache)) == 0


def test_a_folder_of_the_users_cache_stands_in(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(model.parent / "cache"))
    cache = a_cache()
    opened(config_of(model, cache, kv_disk_folder=None), cache).close()
    assert [path.suffix for path in (model.parent / "cache" / "antiphon" / "kv").iterdir()] == [".blocks"]


@pytest.mark.parametrize("file", ["engine/decoder/rope.py", "kernels/state_rows.py", "adapters/weights.py"])
def test_other_code_finds_nothing(model: Path, monkeypatch: pytest.MonkeyPatch, file: str) -> None:
    """A block of a request with an adapter depends on the code that scales adapters, too."""
    cache = a_cache()
    config = config_of(model, cache)
    sources = model.parent / "sources"
    for package in ("engine", "kernels", "adapters"):
        shutil.copytree(fingerprint.ROOT / package, sources / package, ignore=shutil.ignore_patterns("library"))
    monkeypatch.setattr(fingerprint, "ROOT", sources)
    store_one(opened(config, cache))
    assert num_kept(opened(config, cache)) == 1
    (sources / file).write_text("mended")
    assert num_kept(opened(config, cache)) == 0
