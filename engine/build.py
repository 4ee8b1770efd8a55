"""Build an engine from a configuration: the one module that knows all its parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from adapters.errors import NoBaseTensorError
from adapters.identity import AdapterRef
from adapters.loading import AdapterLoader, BaseTensors, LayOut
from engine.adapter_pool import AdapterPool, Locate
from engine.config import EngineConfig, ResolvedConfig
from engine.cpu.build import cpu_parts
from engine.decoder.families import PLAIN_NORMS
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.engine import Engine
from engine.errors import CheckpointError
from engine.hardware import DTYPE_BY_NAME, probe
from engine.loading.checkpoint import WeightSource, load_parameters, tensor_reader
from engine.loading.spec import read_checkpoint_spec, read_model_spec
from engine.metrics import StepTimes
from engine.parts import Parts
from engine.resolve import Hardware
from engine.runner import Runner
from engine.sampling.grammar import GrammarStore
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step_costs import StepCosts
from engine.tiers.build import open_tiers
from engine.warm_up import warm_up
from kernels.arena import give_back_memory

_logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    adapters: Sequence[AdapterRef] = (),
    weights: WeightSource = load_parameters,
    *,
    locate: Locate = lambda ref: ref,
    warms_up: bool = False,
) -> Engine:
    """Load a checkpoint and return an engine ready to step; it serves once its `run` or `step` is called.

    On a CPU, sets torch's thread count for the whole process.

    Args:
        weights: source of the parameters. If it is not the default, only config.json is read from the checkpoint, and
            the base weights that adapters with DoRA, biases or norms need.
        locate: see `AdapterPool`.
        warms_up: run steps that tell what one takes here, see `engine.warm_up`.

    Raises:
        CheckpointError: the checkpoint is missing, broken or of an unknown architecture.
        ConfigError: options are out of range or exclude each other.
    """
    # If the parameters come from elsewhere, the checkpoint's weight files may be missing.
    spec = (read_checkpoint_spec if weights is load_parameters else read_model_spec)(config.model_path)
    hardware = probe(config)
    parts = (cpu_parts if hardware.device == "cpu" else _cuda_parts)(config, spec, hardware, weights)
    resolved = parts.config
    _logger.info("engine: %s", resolved)
    device = torch.device(resolved.device)
    arrival = threading.Event()
    loader = _adapter_loader(spec, resolved, parts.lay_out)
    pool = AdapterPool(
        adapters, loader, resolved, device, lent_memory=parts.cache.pages, locate=locate, on_change=arrival.set
    )
    give_back_memory()
    tiers = open_tiers(resolved, parts.cache, arrival.set, outlives=weights is load_parameters)

    def close() -> None:
        pool.close()
        if tiers is not None:
            tiers.close()

    grammars = GrammarStore(config.tokenizer_path or config.model_path, spec.vocab_size, spec.eos_ids)
    sampler = Sampler(resolved.num_rows, spec.vocab_size, device, spec.eos_ids, grammars, choose=parts.choose)
    runner = Runner(parts.buffers, parts.model, parts.cache, sampler, pool.weights, parts.steps_ahead)
    costs = StepCosts()
    if warms_up:
        warm_up(resolved, runner, pool, costs)
        runner.times = StepTimes()
    return Engine(
        resolved,
        Scheduler(resolved, pool, spec.eos_ids, mover=tiers, draft_model=parts.draft_model, costs=costs),
        runner,
        adapters=pool,
        close=close,
        arrival=arrival,
        pause_wish=parts.pause_wish,
        compile_grammar=grammars.compile,
    )


def _adapter_loader(spec: ModelSpec, config: ResolvedConfig, lay_out: LayOut) -> AdapterLoader:
    dtype = DTYPE_BY_NAME[config.dtype]
    norms = spec.norms if isinstance(spec, DecoderSpec) else PLAIN_NORMS

    @contextmanager
    def open_base() -> Iterator[BaseTensors]:
        with tensor_reader(config.model_path, spec) as read:

            def base(name: str) -> torch.Tensor:
                is_wide = norms.is_wide and name.endswith("norm.weight")
                try:
                    return read(name, torch.float32 if is_wide else dtype)
                except CheckpointError as error:
                    # transformers calls some modules otherwise than their checkpoints do.
                    raise NoBaseTensorError(name) from error

            yield base

    return AdapterLoader(
        spec.module_shapes(),
        config.max_adapter_rank,
        dtype,
        open_base=open_base,
        lay_out=lay_out,
        widths=spec.widths(),
        norm_offset=norms.offset,
        is_tied=spec.is_tied,
    )


def _cuda_parts(config: EngineConfig, spec: ModelSpec, hardware: Hardware, weights: WeightSource) -> Parts:
    # Triton is imported only where there is a GPU.
    from engine.gpu.build import gpu_parts
    from engine.gpu.runtime import CudaRuntime

    return gpu_parts(config, spec, hardware, weights, CudaRuntime(torch.device("cuda")))
