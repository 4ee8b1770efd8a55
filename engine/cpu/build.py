"""Build a CPU's parts of an engine: weights, threads for our kernels where they can run, and a draft model."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial

import torch

from adapters.weights import AdapterWeights, RawAdapter
from engine import machine
from engine.adapter_tables import entries_of, num_experts_of
from engine.backend import Backend
from engine.buffers import InputBuffers
from engine.config import EngineConfig, ResolvedConfig
from engine.cpu.called_backend import CalledBackend, leaves_experts_to_torch
from engine.cpu.held import beside_weights, held_bytes, warn_if_too_much
from engine.cpu.native_backend import NativeBackend, can_run
from engine.cpu.native_lora import PanelAdapter
from engine.cpu.panels import can_attend
from engine.cpu.recorded import RecordedModel
from engine.decoder.decoder import Decoder
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.errors import ConfigError
from engine.fallback.spec import FallbackSpec
from engine.hardware import DTYPE_BY_NAME
from engine.kv_cache import KvCache
from engine.loading.checkpoint import WeightSource, load_parameters
from engine.loading.spec import read_checkpoint_spec
from engine.parts import Parts
from engine.resolve import UNLIMITED_BYTES, Hardware, resolve
from engine.runner import Runner, StepModel
from engine.sampling.sampler import Sampler
from engine.speculation.draft_config import resolve_draft
from engine.speculation.draft_model import DraftModel, no_weights
from kernels import native
from kernels.program import PauseFlag, Pool

_logger = logging.getLogger(__name__)
NEEDED = "a head width and block_tokens that are multiples of 16, and even sizes"


def cpu_parts(config: EngineConfig, spec: ModelSpec, hardware: Hardware, weights: WeightSource) -> Parts:
    """Load the weights, and set torch's thread count for the whole process.

    Raises:
        CheckpointError: weights are missing, broken or unexpected.
        ConfigError: options are out of range or exclude each other, or the weights do not fit into free memory.
    """
    draft_spec = None if config.draft_model is None else read_checkpoint_spec(config.draft_model)
    left = _beside_weights(config, spec, draft_spec, hardware)
    resolved = _resolve(config, spec, left)
    threads = start_threads(spec, resolved)
    # Our kernels have their own thread pool; two pools that spin while waiting for each other are slower than none.
    torch.set_num_threads(resolved.num_threads if threads is None else 1)
    buffers, model, cache = build_model(spec, resolved, threads, weights)
    warn_if_too_much(spec, resolved, resolved.num_blocks * cache.block_bytes, left)

    def lay_out(raw: RawAdapter) -> AdapterWeights:
        if threads is None or leaves_experts_to_torch(spec):
            return raw.scaled()
        num_layers, num_experts, entries = spec.num_model_layers(), num_experts_of(spec), entries_of(spec)
        return PanelAdapter(raw, num_layers, threads.kernels, num_experts=num_experts, entries=entries)

    pause_wish = model.pause_wish if isinstance(model, RecordedModel) else None
    draft_model = None
    if draft_spec is not None:
        # A share of what this model's cache and adapters certainly leave.
        half = replace(left, free_bytes=left.free_bytes // 2)
        draft_config = resolve_draft(config, spec, draft_spec, partial(_resolve, hardware=half))
        draft_model = _draft_model(draft_config, spec, draft_spec, threads, pause_wish)
    return Parts(
        config=resolved,
        buffers=buffers,
        model=model,
        cache=cache,
        lay_out=lay_out,
        pause_wish=pause_wish,
        draft_model=draft_model,
    )


def start_threads(spec: ModelSpec, config: ResolvedConfig, others: Pool | None = None) -> Pool | None:
    """Return threads for our kernels; None if torch must be used, for lack of a compiler or an unsupported geometry.

    Args:
        others: those of another model, to use for this one, too: two pools that spin while the other works would take
            each other's cores.
    """
    if not _can_run(spec, config.block_tokens):
        _logger.warning("%s is computed by torch, which is slower: our kernels need %s.", config.model_path, NEEDED)
    kernels = _kernels(spec, config.block_tokens)
    return None if kernels is None else others or Pool(kernels, config.num_threads, machine.NICENESS)


def build_model(
    spec: ModelSpec, config: ResolvedConfig, threads: Pool | None, weights: WeightSource = load_parameters
) -> tuple[InputBuffers, StepModel, KvCache]:
    """Load the weights and return the input buffers, the model and its KV cache.

    Args:
        threads: as `start_threads` returns them for the model.

    Raises:
        CheckpointError: weights are missing, broken or unexpected.
        ConfigError: quantization is requested, and our kernels cannot run here.
    """
    if config.quantization is not None and threads is None:
        needs = NEEDED
        if _can_run(spec, config.block_tokens):
            needs = "our compiled kernels, which cannot be compiled or loaded here; a warning in the log says why"
        raise ConfigError(f"quantization: {config.quantization!r} needs {needs}.")
    dtype, device = DTYPE_BY_NAME[config.dtype], torch.device(config.device)
    cache = KvCache(
        layout=spec.cache_layout(config.max_model_len),
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        kv_shapes=spec.kv_shapes(),
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


def _kernels(spec: ModelSpec, block_tokens: int) -> native.NativeKernels | None:
    return native.load() if _can_run(spec, block_tokens) else None


def _resolve(config: EngineConfig, spec: ModelSpec, hardware: Hardware) -> ResolvedConfig:
    """Resolve the configuration; bfloat16 is fast also without instructions for it, given wide registers.

    Our kernels read half as much, and widen it there; torch's products are slow.
    """
    has_wide_registers = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    widens = has_wide_registers and _kernels(spec, config.block_tokens) is not None
    return resolve(config, spec, replace(hardware, has_fast_bfloat16=hardware.has_fast_bfloat16 or widens))


def _can_run(spec: ModelSpec, block_tokens: int) -> bool:
    return can_run(spec, block_tokens) if isinstance(spec, DecoderSpec) else can_attend(spec, block_tokens)


def _beside_weights(
    config: EngineConfig, spec: ModelSpec, draft_spec: ModelSpec | None, hardware: Hardware
) -> Hardware:
    """Return the machine with the memory that weights will leave, which are not read yet."""
    roomy = replace(hardware, free_bytes=UNLIMITED_BYTES, host_bytes=UNLIMITED_BYTES)

    def weight_bytes(config: EngineConfig, spec: ModelSpec) -> int:
        resolved = _resolve(config, spec, roomy)
        return held_bytes(spec, resolved, in_panels=_kernels(spec, resolved.block_tokens) is not None)

    own_bytes = weight_bytes(config, spec)
    draft_bytes = 0 if draft_spec is None else resolve_draft(config, spec, draft_spec, weight_bytes)
    return beside_weights(config, hardware, own_bytes, draft_bytes)


def _draft_model(
    config: ResolvedConfig, spec: ModelSpec, draft_spec: ModelSpec, threads: Pool | None, pause_wish: PauseFlag | None
) -> DraftModel:
    _logger.info("draft model: %s", config)
    buffers, model, cache = build_model(draft_spec, config, start_threads(draft_spec, config, threads))
    sampler = Sampler(config.num_rows, draft_spec.vocab_size, torch.device("cpu"), draft_spec.eos_ids)
    runner = Runner(buffers, model, cache, sampler, no_weights)
    return DraftModel(config, runner, spec.vocab_size, pause_wish=pause_wish)
