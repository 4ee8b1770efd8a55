"""Build the GPU's parts of an engine: weights, the cache in the memory that is left, recorded steps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from adapters.loading import LayOut
from engine.adapter_tables import entries_of, num_experts_of
from engine.config import EngineConfig, ResolvedConfig
from engine.decoder.decoder import Decoder
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored_fp8 import StoredFp8
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import ConfigError
from engine.fallback.decoder import FallbackDecoder
from engine.fallback.spec import FallbackSpec
from engine.gpu.adapters import TritonLora
from engine.gpu.backend import TritonBackend
from engine.gpu.choosing import TokenChooser
from engine.gpu.inputs import DeviceInputs
from engine.gpu.model import GpuModel, recorded_sizes
from engine.gpu.progress import Progress
from engine.gpu.rehearsal import Rehearsal
from engine.gpu.runtime import CudaRuntime
from engine.gpu.streamed_linear import measure, stream_each
from engine.gpu.tabled_adapter import TabledAdapter
from engine.gpu.trial import settle
from engine.hardware import DTYPE_BY_NAME
from engine.kv_cache import KvCache
from engine.loading.checkpoint import WeightSource
from engine.loading.names import parameters
from engine.loading.weight import Weight
from engine.parts import Parts
from engine.resolve import Hardware, resolve
from kernels import architecture

_logger = logging.getLogger(__name__)

RESERVED_BYTES = 512 << 20
"""Memory left for what is not measured: recorded steps, library workspaces."""
TRIED_POSITION = 1023
"""Of the tokens of decode steps that are tried: far enough for attention to divide a context among programs."""


def gpu_parts(
    config: EngineConfig, spec: ModelSpec, hardware: Hardware, weights: WeightSource, runtime: CudaRuntime
) -> Parts:
    """Load the weights, compile, measure a full step, give the cache the memory left, and record decode steps.

    Raises:
        CheckpointError: weights are missing, broken or left over.
        ConfigError: options are out of range, or the memory does not suffice.
    """
    checked = resolve(config, spec, hardware)
    fraction = f"raise gpu_memory_fraction ({config.gpu_memory_fraction:g})"
    with _memory_for(f"the weights of {config.model_path}", f"{fraction}, or quantize them (quantization)"):
        adapters = _adapters(spec, checked, runtime)
        is_mixed = _is_mixed(spec, checked.quantization)
        backend = TritonBackend(adapters, checked.max_num_seqs, checked.quantization, is_mixed=is_mixed)
        decoder = _load(spec, backend, checked, weights, runtime.device)
        choose = TokenChooser(runtime, checked.max_num_seqs, spec.vocab_size)
    rehearsal = Rehearsal(decoder, adapters, choose, checked, _cache_dtype(checked), runtime.device)

    def launch_all() -> None:
        stream_each(backend.linears)
        rehearsal.run()

    with _memory_for("a full step", f"lower max_batched_tokens ({checked.max_batched_tokens}), or {fraction}"):
        runtime.compile_ahead(launch_all, hardware.num_cores, Progress("compiling kernels").reach)
        measure(backend.linears, runtime)
        # Its recordings took more memory than steps do: of 4-bit weights, that of whole matrices dequantized.
        runtime.begin_pool()
        can_record = _can_record(decoder, rehearsal, runtime)
        peak_bytes = runtime.peak_bytes(rehearsal.run)
    left = hardware.free_bytes - peak_bytes - RESERVED_BYTES - checked.max_device_adapter_bytes
    _logger.info("a full step takes %.2f GiB with the weights; %.2f GiB are left", peak_bytes / 2**30, left / 2**30)
    config = replace(config, max_device_adapter_bytes=checked.max_device_adapter_bytes)
    resolved = resolve(config, spec, replace(hardware, free_bytes=max(0, left)))
    with _memory_for("the cache", _smaller_cache(config, resolved)):
        cache = _cache(spec, resolved, runtime.device)
        if isinstance(decoder, FallbackDecoder):
            decoder.make_room(resolved.num_snapshots)
    # Pages take more memory, so adapters use them only if blocks can be lent.
    can_lend = resolved.lent_run_blocks <= resolved.max_lent_blocks
    page_bytes = cache.pages(range(resolved.lent_run_blocks))[0].nbytes if can_lend else 0
    sizes = recorded_sizes(resolved.max_num_seqs) if can_record else []
    with _memory_for("recorded steps", f"lower max_num_seqs ({resolved.max_num_seqs}), or {fraction}"):
        inputs = DeviceInputs(resolved, cache.null_block, runtime, sizes)
        model = GpuModel(decoder, backend, inputs)
        _tell_if_more(model.record(cache, sizes, runtime))
        # Recording has given back the memory of full steps: taken again now, it cannot be short when requests come.
        rehearsal.run()
    return Parts(
        config=resolved,
        buffers=inputs,
        model=model,
        cache=cache,
        lay_out=_lay_out_for(spec, page_bytes),
        choose=choose,
        steps_ahead=1,
    )


def _is_mixed(spec: ModelSpec, quantization: str | None) -> bool:
    """Return whether a quantized checkpoint leaves some weights dense on purpose."""
    stored = spec.stored
    if stored is None or not stored.stays:
        return False
    return isinstance(stored, StoredInt4) or (isinstance(stored, StoredFp8) and quantization == "fp8")


@contextmanager
def _memory_for(what: str, advice: str) -> Iterator[None]:
    """Raise ConfigError with the advice if the device has not enough memory for something."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(f"not enough GPU memory for {what}: {advice}.") from error


def _smaller_cache(config: EngineConfig, resolved: ResolvedConfig) -> str:
    """Return which numbers make the cache smaller."""
    numbers = []
    if config.kv_cache_bytes is not None:
        numbers.append(f"kv_cache_bytes ({config.kv_cache_bytes})")
    if resolved.num_snapshots:
        numbers.append(f"state_cache_bytes ({resolved.num_snapshots} states)")
    # What was free when it was measured, others have taken since.
    return "lower " + " or ".join(numbers or [f"gpu_memory_fraction ({config.gpu_memory_fraction:g})"])


def _tell_if_more(taken_bytes: int) -> None:
    """Warn if recorded steps have taken more than was reserved for them."""
    if taken_bytes > RESERVED_BYTES:
        _logger.warning(
            "recorded steps take %.2f GiB, but %.2f were reserved: gpu_memory_fraction is exceeded by the rest",
            taken_bytes / 2**30,
            RESERVED_BYTES / 2**30,
        )


def _can_record(decoder: Decoder | FallbackDecoder, rehearsal: Rehearsal, runtime: CudaRuntime) -> bool:
    # Modules of transformers may wait for the device, which a recording cannot.
    if isinstance(decoder, FallbackDecoder) and not all(map(runtime.only_enqueues, rehearsal.decodes())):
        _logger.info("decode steps of %s are launched, as they wait for the device", decoder.spec.architecture)
        return False
    # Layers with states begin anew at the first position, and would go on from step to step at any other.
    position = 0 if decoder.spec.state_bytes(1) else TRIED_POSITION
    return settle(partial(rehearsal.decodes, position), runtime)


def _adapters(spec: ModelSpec, config: ResolvedConfig, runtime: CudaRuntime) -> TritonLora:
    sizes = config.max_num_seqs, config.max_adapter_rank, config.max_batched_tokens
    return TritonLora(runtime, *sizes, is_mixture=num_experts_of(spec) > 0, entries=entries_of(spec))


def _lay_out_for(spec: ModelSpec, page_bytes: int) -> LayOut:
    sizes = spec.num_model_layers(), page_bytes, num_experts_of(spec), entries_of(spec)
    return lambda raw: TabledAdapter.of(raw.scaled(), *sizes)


def _load(
    spec: ModelSpec, backend: TritonBackend, config: ResolvedConfig, weights: WeightSource, device: torch.device
) -> Decoder | FallbackDecoder:
    dtype = DTYPE_BY_NAME[config.dtype]
    if isinstance(spec, FallbackSpec):
        from engine.fallback.loading import load_fallback

        return load_fallback(config.model_path, spec, backend, dtype, device, config.num_rows, stays_on_device=True)
    assert isinstance(spec, DecoderSpec)
    found = weights(config.model_path, spec, dtype, device)
    return Decoder(spec, _telling(found, spec), backend, config.max_model_len)


def _telling(weights: Iterable[tuple[str, Weight]], spec: DecoderSpec) -> Iterator[tuple[str, Weight]]:
    """Yield a decoder's parameters and report how many are on the device."""
    progress, total = Progress("loading weights"), len([*parameters(spec)])
    for number, parameter in enumerate(weights, start=1):
        yield parameter
        progress.reach(number, total)


def _cache(spec: ModelSpec, config: ResolvedConfig, device: torch.device) -> KvCache:
    return KvCache(
        layout=spec.cache_layout(config.max_model_len),
        num_blocks=config.num_blocks,
        block_tokens=config.block_tokens,
        kv_shapes=spec.kv_shapes(),
        dtype=_cache_dtype(config),
        device=device,
    )


def _cache_dtype(config: ResolvedConfig) -> torch.dtype:
    if config.kv_cache_dtype is None:
        return DTYPE_BY_NAME[config.dtype]
    held = torch.int8 if config.kv_cache_dtype == "int8" else architecture.fp8_dtype()
    assert held is not None
    return held
