"""Build an engine from a configuration: the one module that knows all its parts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from functools import partial

import torch

from adapters.errors import NoBaseTensorError
from adapters.identity import AdapterRef
from adapters.loading import AdapterLoader, LayOut
from adapters.weights import AdapterWeights, RawAdapter
from engine import machine
from engine.adapter_pool import AdapterPool, Locate
from engine.adapter_tables import entries_of, num_experts_of
from engine.backend import Backend
from engine.buffers import InputBuffers
from engine.config import EngineConfig, ResolvedConfig
from engine.cpu.called_backend import CalledBackend, leaves_experts_to_torch
from engine.cpu.native_backend import NativeBackend, can_run
from engine.cpu.native_lora import PanelAdapter
from engine.cpu.panels import can_attend
from engine.cpu.recorded import RecordedModel
from engine.decoder.decoder import Decoder
from engine.decoder.families import PLAIN_NORMS
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.engine import Engine
from engine.errors import CheckpointError, ConfigError
from engine.fallback.spec import FallbackSpec
from engine.hardware import DTYPE_BY_NAME, probe
from engine.kv_cache import KvCache
from engine.loading.checkpoint import WeightSource, load_parameters, read_tensor
from engine.loading.spec import read_checkpoint_spec, read_model_spec
from engine.parts import Parts
from engine.ports import PauseWish
from engine.resolve import Hardware, resolve
from engine.runner import Runner, StepModel
from engine.sampling.grammar import GrammarStore
from engine.sampling.sampler import Sampler
from engine.scheduling.scheduler import Scheduler
from engine.speculation.draft_config import resolve_draft
from engine.speculation.draft_model import DraftModel, no_weights
from engine.tiers.build import open_tiers
from kernels import native
from kernels.arena import give_back_memory
from kernels.native import NativeKernels
from kernels.program import Pool

_logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    adapters: Sequence[AdapterRef] = (),
    weights: WeightSource = load_parameters,
    *,
    locate: Locate = lambda ref: ref,
) -> Engine:
    """Load a checkpoint and return an engine ready to step; nothing runs until its `run` or `step` is called.

    On a CPU, sets torch's thread count for the whole process.

    Args:
        weights: source of the parameters. If it is not the default, only config.json is read from the checkpoint, and
            the base weights that adapters with DoRA, biases or norms need.
        locate: see `AdapterPool`.

    Raises:
        CheckpointError: the checkpoint is missing, broken or of an unknown architecture.
        ConfigError: options are out of range or exclude each other.
    """
    # If the parameters come from elsewhere, the checkpoint's weight files may be missing.
    spec = (read_checkpoint_spec if weights is load_parameters else read_model_spec)(config.model_path)
    hardware = probe(config)
    parts = (_cpu_parts if hardware.device == "cpu" else _cuda_parts)(config, spec, hardware, weights)
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
    return Engine(
        resolved,
        Scheduler(resolved, pool, spec.eos_ids, mover=tiers, draft_model=parts.draft_model),
        Runner(parts.buffers, parts.model, parts.cache, sampler, pool.weights, parts.steps_ahead),
        adapters=pool,
        close=close,
        arrival=arrival,
        pause_wish=parts.pause_wish,
        compile_grammar=grammars.compile,
    )


def _adapter_loader(spec: ModelSpec, config: ResolvedConfig, lay_out: LayOut) -> AdapterLoader:
    dtype = DTYPE_BY_NAME[config.dtype]
    norms = spec.norms if isinstance(spec, DecoderSpec) else PLAIN_NORMS

    def base(name: str) -> torch.Tensor:
        is_wide = norms.is_wide and name.endswith("norm.weight")
        try:
            return read_tensor(config.model_path, spec, name, torch.float32 if is_wide else dtype)
        except CheckpointError as error:
            # transformers calls some modules otherwise than their checkpoints do.
            raise NoBaseTensorError(name) from error

    return AdapterLoader(
        spec.module_shapes(),
        config.max_adapter_rank,
        dtype,
        base=base,
        lay_out=lay_out,
        widths=spec.widths(),
        norm_offset=norms.offset,
        is_tied=spec.is_tied,
    )


def _cpu_parts(config: EngineConfig, spec: ModelSpec, hardware: Hardware, weights: WeightSource) -> Parts:
    resolved = resolve(config, spec, hardware)
    kernels = kernels_for(spec, resolved)
    # Our kernels have their own thread pool; two pools that spin while waiting for each other are slower than none.
    torch.set_num_threads(resolved.num_threads if kernels is None else 1)
    threads = None if kernels is None else Pool(kernels, resolved.num_threads, machine.NICENESS)
    buffers, model, cache = build_model(spec, resolved, weights, threads)

    def lay_out(raw: RawAdapter) -> AdapterWeights:
        if kernels is None or leaves_experts_to_torch(spec):
            return raw.scaled()
        num_layers, num_experts, entries = spec.num_model_layers(), num_experts_of(spec), entries_of(spec)
        return PanelAdapter(raw, num_layers, kernels, num_experts=num_experts, entries=entries)

    pause_wish = model.pause_wish if isinstance(model, RecordedModel) else None
    draft_model = None
    if config.draft_model is not None:
        draft_model = _draft_model(config, spec, hardware, threads, pause_wish)
    return Parts(
        config=resolved,
        buffers=buffers,
        model=model,
        cache=cache,
        lay_out=lay_out,
        pause_wish=pause_wish,
        draft_model=draft_model,
    )


def _draft_model(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware, threads: Pool | None, pause_wish: PauseWish | None
) -> DraftModel:
    assert config.draft_model is not None
    draft_spec = read_checkpoint_spec(config.draft_model)
    resolved = resolve_draft(config, spec, draft_spec, partial(resolve, hardware=hardware))
    _logger.info("draft model: %s", resolved)
    # The same threads: two pools that spin while the other works would take each other's cores.
    buffers, model, cache = build_model(draft_spec, resolved, threads=threads)
    sampler = Sampler(resolved.num_rows, draft_spec.vocab_size, torch.device("cpu"), draft_spec.eos_ids)
    runner = Runner(buffers, model, cache, sampler, no_weights)
    return DraftModel(resolved, runner, spec.vocab_size, pause_wish=pause_wish)


def _cuda_parts(config: EngineConfig, spec: ModelSpec, hardware: Hardware, weights: WeightSource) -> Parts:
    # Triton is imported only where there is a GPU.
    from engine.gpu.build import gpu_parts
    from engine.gpu.runtime import CudaRuntime

    return gpu_parts(config, spec, hardware, weights, CudaRuntime(torch.device("cuda")))


def kernels_for(spec: ModelSpec, config: ResolvedConfig) -> NativeKernels | None:
    """Return our CPU kernels; None if torch must be used, for lack of a compiler or for an unsupported geometry."""
    block_tokens = config.block_tokens
    can = can_run(spec, block_tokens) if isinstance(spec, DecoderSpec) else can_attend(spec, block_tokens)
    return native.load() if can else None


def build_model(
    spec: ModelSpec,
    config: ResolvedConfig,
    weights: WeightSource = load_parameters,
    threads: Pool | None = None,
) -> tuple[InputBuffers, StepModel, KvCache]:
    """Load the weights and return the input buffers, the model and its KV cache, on a CPU.

    Args:
        threads: those of our kernels, if they can run this model; None to start some.

    Raises:
        CheckpointError: weights are missing, broken or unexpected.
        ConfigError: quantization is requested, and our kernels cannot run here.
    """
    kernels = kernels_for(spec, config)
    if config.quantization is not None and kernels is None:
        raise ConfigError(
            f"quantization: {config.quantization!r} needs a C++ compiler, and a head width and block_tokens that are "
            "multiples of 16."
        )
    if kernels is None:
        threads = None
    elif threads is None:
        threads = Pool(kernels, config.num_threads, machine.NICENESS)
    dtype, device = DTYPE_BY_NAME[config.dtype], torch.device(config.device)
    cache = KvCache.of(
        spec,
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        max_model_len=config.max_model_len,
        dtype=dtype,
        device=device,
        by_block=True,
    )
    buffers = InputBuffers(config, cache.null_block)
    if isinstance(spec, FallbackSpec):
        # Transformers is imported only where it computes.
        from engine.fallback.loading import load_fallback

        called = Backend()
        if threads is not None:
            called = CalledBackend(threads, dtype, config.quantization, entries_of(spec))
        fallback = load_fallback(config.model_path, spec, called, dtype, device, config.num_rows)
        fallback.make_room(config.num_snapshots)
        return buffers, fallback, cache
    assert isinstance(spec, DecoderSpec)
    parameters = weights(config.model_path, spec, dtype, device)
    if threads is None:
        return buffers, Decoder(spec, parameters, Backend(), config.max_model_len), cache
    backend = NativeBackend(threads, dtype, config.max_adapter_rank, quantization=config.quantization)
    decoder = Decoder(spec, parameters, backend, config.max_model_len)
    return buffers, RecordedModel(decoder, backend, buffers.whole(), cache), cache
