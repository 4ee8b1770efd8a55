"""Puts an engine together from a configuration: the one place that knows all its parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import torch

from adapters.identity import AdapterRef
from engine.adapter_pool import AdapterPool
from engine.backend import CpuBackend, KvCache
from engine.config import EngineConfig
from engine.decoder.decoder import Decoder
from engine.decoder.spec import read_spec
from engine.engine import Engine
from engine.loading.checkpoint import load_parameters
from engine.resolve import DTYPE_BY_NAME, probe, resolve
from engine.runner import Runner
from engine.sampling.sampler import Sampler
from engine.scheduler import Scheduler

_logger = logging.getLogger(__name__)


def build_engine(config: EngineConfig, adapters: Sequence[AdapterRef] = ()) -> Engine:
    """Load a checkpoint and return an engine ready to step; nothing runs until its `run` or `step` is called.

    Sets the number of torch's threads for the whole process.

    Raises:
        CheckpointError: the checkpoint is missing, broken or of an unknown architecture.
        ConfigError: options are out of range or exclude each other.
    """
    spec = read_spec(config.model_path)
    resolved = resolve(config, spec, probe(config.device))
    _logger.info("engine: %s", resolved)
    torch.set_num_threads(resolved.num_threads)
    dtype, device = DTYPE_BY_NAME[resolved.dtype], torch.device(resolved.device)
    arrival = threading.Event()
    pool = AdapterPool(adapters, spec.linear_shapes(), resolved, dtype, device, on_change=arrival.set)
    backend = CpuBackend()
    decoder = Decoder(spec, load_parameters(config.model_path, spec, dtype, device), backend, resolved.max_model_len)
    cache = KvCache(
        num_layers=spec.num_layers,
        num_blocks=resolved.num_blocks,
        block_tokens=resolved.block_tokens,
        kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=device,
    )
    sampler = Sampler(resolved.max_num_seqs, spec.vocab_size, device, spec.eos_ids)
    return Engine(
        resolved,
        Scheduler(resolved, pool, spec.eos_ids),
        Runner(resolved, decoder, cache, sampler, pool),
        residency=pool,
        close=pool.close,
        arrival=arrival,
    )
