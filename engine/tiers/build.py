"""Open the tiers that a configuration asks for."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import torch

from engine.config import ResolvedConfig
from engine.errors import ConfigError
from engine.kv_cache import KvCache
from engine.loading.fingerprint import code_digest, model_fingerprint
from engine.tiers.disk_slots import DiskFullError, DiskSlots
from engine.tiers.host_slots import HostSlots
from engine.tiers.mover import SlotStore, TierMover
from kernels import native
from kernels.compiling import cache_folder

_logger = logging.getLogger(__name__)


def open_tiers(
    config: ResolvedConfig, cache: KvCache, on_done: Callable[[], None], *, outlives: bool
) -> TierMover | None:
    """Return the mover of blocks between the cache and the tiers below it, None if there are no tiers.

    Args:
        on_done: see `TierMover`.
        outlives: whether a later engine with the same checkpoint has the same weights.

    Raises:
        ConfigError: memory cannot be allocated, or the folder of the disk tier cannot be used, other than for lack of
            room.
    """
    device, block_bytes = torch.device(config.device), cache.block_bytes
    tiers: list[SlotStore] = []
    if config.kv_host_bytes:
        tiers.append(_host_slots(config.kv_host_bytes, block_bytes, device))
    if config.kv_disk_bytes:
        folder = cache_folder() / "kv" if config.kv_disk_folder is None else Path(config.kv_disk_folder)
        # Files are per model path and number format; other weights at the same path reset the file.
        title = hashlib.sha256(f"{os.path.abspath(config.model_path)} {_numbers(config)}".encode()).hexdigest()[:16]
        num_slots = config.kv_disk_bytes // block_bytes
        fingerprint = _fingerprint(config) if outlives else secrets.token_hex()
        try:
            tiers.append(DiskSlots(folder, title, fingerprint, num_slots=num_slots, block_bytes=block_bytes))
        except DiskFullError as error:
            # As when the disk fills up later, the engine does without. A replica must start nevertheless.
            _logger.warning("without a tier on disk until the next start: %s", error)
    return TierMover(cache, tiers, device, on_done) if tiers else None


def _host_slots(num_bytes: int, block_bytes: int, device: torch.device) -> HostSlots:
    try:
        return HostSlots(num_bytes // block_bytes, block_bytes, is_pinned=device.type == "cuda")
    except RuntimeError as error:
        raise ConfigError(
            f"kv_host_bytes: {num_bytes} bytes of page-locked memory cannot be allocated: {error}"
        ) from error


def _numbers(config: ResolvedConfig) -> str:
    computed = (config.device, config.dtype, config.quantization, config.kv_cache_dtype, config.block_tokens)
    return " ".join(map(str, (*computed, *config.windows)))


def _fingerprint(config: ResolvedConfig) -> str:
    """Return a fingerprint of everything that a block's content depends on besides its tokens and their adapter.

    The code determines a block's layout and values, so its digest is part of the fingerprint.
    """
    kernels = native.load() if config.device == "cpu" else None
    code = (code_digest(("adapters", "engine", "kernels")), None if kernels is None else kernels.name)
    libraries = [version(name) for name in ("torch", "transformers")]
    return model_fingerprint(config.model_path, f"{_numbers(config)} {code} {libraries}")
