"""Resolve a configuration into numbers: pure arithmetic on the checkpoint's geometry and the machine's size.

Does not import torch, so that a configuration can be checked before anything is started.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import NamedTuple

from engine.cache.reach import Reach
from engine.config import EngineConfig, ResolvedConfig
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored_fp8 import StoredFp8
from engine.decoder.stored_int4 import StoredInt4
from engine.errors import ConfigError

BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2}
DEVICES_BY_QUANTIZATION = {"int8": ("cpu",), "fp8": ("cuda",), "int4": ("cpu", "cuda")}
FP8_MULTIPLE, INT4_MULTIPLE_BY_DEVICE = 16, {"cpu": 32, "cuda": 128}
CACHE_DTYPES = ("int8", "fp8")
UNLIMITED_BYTES = 1 << 62
CPU_CACHE_SHARE, MOST_CPU_CACHE_SHARE = 0.2, 0.5
"""Share of the free memory; a laptop runs other programs too. And the most, if one request of full length needs it."""
MAX_UNASKED_BLOCKS = 1 << 18
"""Blocks that a GPU's cache has at most, unless more are asked for or in use: each costs the host memory, too."""
HOST_ADAPTER_SHARE, MAX_HOST_ADAPTER_BYTES = 0.25, 32 << 30
"""Share of the free memory beside `kv_host_bytes`, and its cap."""
GPU_ADAPTER_SHARE = 1 / 32
"""Share of the engine's memory: 4 of 140 GiB; an adapter of rank 16 for 8 billion parameters takes 80 MiB."""
LENT_PAGE_BYTES, LENT_ALIGNMENT = 2 << 20, 16
"""A matrix of an adapter must fit in a page: the largest of rank 64 for 8 billion parameters takes 1.8 MiB."""
GUEST_SHARE = 16
"""A CPU has one guest row per this many rows, for newcomers that run before the rest of a step that holds all rows."""
CPU_SPECULATIVE_TOKENS = 16
"""Maximum draft length: a request whose drafts are all accepted gets 17 tokens per step."""
SNAPSHOT_SHARE, MAX_SNAPSHOTS_PER_ROW = 0.5, 16
"""Memory for snapshots of recurrent states relative to the KV cache's, and the maximum number per row."""
CPU_DECODE_GAP_S = 0.2
"""A reader does not notice a pause of this length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The hardware that this process may use.

    Attributes:
        num_cores: threads of this process that can run continuously.
        free_bytes: on a CPU, free memory beside the weights; on a GPU, memory that this process may still take, or,
            after a full step was measured, what is left for the cache.
        host_bytes: free host memory; on a CPU the same as `free_bytes`.
        has_fast_bfloat16: whether bfloat16 is faster than float32.
        has_fp8: whether it has instructions that convert e4m3.
        has_fp8_products: whether it multiplies e4m3 matrices with a scale per row.
    """

    device: str
    num_cores: int
    free_bytes: int
    host_bytes: int
    has_fast_bfloat16: bool
    has_fp8: bool = False
    has_fp8_products: bool = False


class _Sizes(NamedTuple):
    """Sizes that determine how memory is divided; `state_bytes` is the size of one sequence's recurrent states."""

    max_model_len: int
    reach: Reach
    block_bytes: int
    state_bytes: int
    num_rows: int

    @property
    def least_blocks(self) -> int:
        """Blocks for one request of full length."""
        return self.reach.most(self.max_model_len)


class _Shares(NamedTuple):
    num_blocks: int
    num_snapshots: int


def check(config: EngineConfig, spec: ModelSpec) -> None:
    """Reject a configuration that no machine could serve.

    Raises:
        ConfigError: as `resolve` does on a machine with unlimited memory and all instructions.
    """
    everything = Hardware(
        device=config.device or "cpu",
        num_cores=1,
        free_bytes=UNLIMITED_BYTES,
        host_bytes=UNLIMITED_BYTES,
        has_fast_bfloat16=True,
        has_fp8=True,
        has_fp8_products=True,
    )
    resolve(config, spec, everything)


def resolve(config: EngineConfig, spec: ModelSpec, hardware: Hardware) -> ResolvedConfig:
    """Replace every None of `config` by a value.

    Raises:
        ConfigError: an option is out of range, or two exclude each other; the message names them and their values.
    """
    _check_ranges(config)
    dtype = _dtype(config, hardware)
    quantization = _quantization(config.quantization, spec, hardware, dtype)
    _check_quantization(quantization, spec, hardware, dtype)
    max_model_len = _max_model_len(config, spec)
    element_bytes = _cache_element_bytes(config, hardware, dtype)
    layout = spec.cache_layout(max_model_len)
    # Every layer takes the same number of bytes.
    block_bytes = config.block_tokens * spec.kv_bytes_per_token(element_bytes) // spec.num_layers * layout.num_places
    reach = Reach(layout.windows, config.block_tokens, config.max_batched_tokens)
    num_guest_rows = config.max_num_seqs // GUEST_SHARE if hardware.device == "cpu" else 0
    num_rows = config.max_num_seqs + num_guest_rows
    state_bytes = spec.state_bytes(BYTES_BY_DTYPE[dtype])
    sizes = _Sizes(max_model_len, reach, block_bytes, state_bytes, num_rows)
    num_blocks, num_snapshots = _shared_out(config, hardware, sizes)
    num_in_use = num_rows * reach.num_blocks(max_model_len) * len(layout.windows)
    num_blocks = min(num_blocks, _most_blocks(config, hardware, num_in_use))
    _check_tiers(config, hardware, block_bytes, has_states=state_bytes > 0)
    return ResolvedConfig(
        model_path=config.model_path,
        device=hardware.device,
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_host_bytes=config.kv_host_bytes,
        kv_disk_bytes=config.kv_disk_bytes,
        kv_disk_folder=config.kv_disk_folder,
        num_threads=config.num_threads or hardware.num_cores,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_guest_rows=num_guest_rows,
        num_snapshots=num_snapshots,
        max_batched_tokens=config.max_batched_tokens,
        block_tokens=config.block_tokens,
        num_blocks=num_blocks,
        enable_prefix_cache=config.enable_prefix_cache and (num_snapshots > 0 or not state_bytes),
        max_queued_requests=config.max_queued_requests,
        max_adapter_rank=config.max_adapter_rank,
        max_device_adapters=config.max_device_adapters,
        max_device_adapter_bytes=_device_adapter_bytes(config, hardware),
        lent_run_blocks=_lent_run_blocks(config, spec, hardware, element_bytes),
        max_lent_blocks=min(int(num_blocks * config.max_lent_cache_share), num_blocks - reach.most(max_model_len)),
        max_host_adapter_bytes=_host_adapter_bytes(config, hardware),
        num_speculative_tokens=_num_speculative_tokens(config, hardware, has_states=state_bytes > 0),
        max_prefill_tokens_with_decodes=config.max_prefill_tokens_with_decodes,
        max_decode_gap_s=config.max_decode_gap_s or (CPU_DECODE_GAP_S if hardware.device == "cpu" else None),
        max_queue_s=config.max_queue_s,
        vocab_size=spec.vocab_size,
        generates=spec.generates,
        windows=layout.windows,
    )


def _cache_bytes(config: EngineConfig, hardware: Hardware, sizes: _Sizes) -> int:
    if config.kv_cache_bytes:
        return config.kv_cache_bytes
    free_bytes = hardware.free_bytes
    if hardware.device != "cpu":
        # The states are already allocated when free memory is measured.
        return free_bytes
    states_bytes = sizes.num_rows * sizes.state_bytes
    least_bytes = sizes.least_blocks * sizes.block_bytes + states_bytes
    share_bytes = max(int(free_bytes * CPU_CACHE_SHARE), min(least_bytes, int(free_bytes * MOST_CPU_CACHE_SHARE)))
    return max(0, share_bytes - states_bytes)


def _most_blocks(config: EngineConfig, hardware: Hardware, num_in_use: int) -> int:
    """Return how many blocks are worth having: all rows at full length use `num_in_use`, and more keep prefixes."""
    if not config.enable_prefix_cache:
        return num_in_use
    if config.kv_cache_bytes is not None:
        return sys.maxsize
    # A CPU's memory is not the engine's alone.
    return max(num_in_use, MAX_UNASKED_BLOCKS) if hardware.device == "cuda" else num_in_use


def _shared_out(config: EngineConfig, hardware: Hardware, sizes: _Sizes) -> _Shares:
    """Divide memory between KV cache blocks and state snapshots."""
    cache_bytes = _cache_bytes(config, hardware, sizes)
    num_snapshots = _num_snapshots(config, cache_bytes, sizes)
    if config.kv_cache_bytes is None:
        cache_bytes = max(0, cache_bytes - num_snapshots * sizes.state_bytes)
    num_blocks = cache_bytes // sizes.block_bytes
    if num_blocks < sizes.least_blocks:
        raise _too_small(config, hardware, sizes, num_blocks, num_snapshots)
    return _Shares(num_blocks, num_snapshots)


def _num_snapshots(config: EngineConfig, cache_bytes: int, sizes: _Sizes) -> int:
    wanted, state_bytes = config.state_cache_bytes, sizes.state_bytes
    if wanted:
        if not state_bytes:
            raise ConfigError(f"state_cache_bytes: {wanted}, but this model has no recurrent layers.")
        if not config.enable_prefix_cache:
            raise ConfigError(f"state_cache_bytes: {wanted}, but enable_prefix_cache is false: nothing would be found.")
        if wanted < state_bytes:
            raise ConfigError(
                f"state_cache_bytes: {wanted} bytes cannot hold one recurrent state of this model, {state_bytes} bytes."
            )
        return wanted // state_bytes
    if wanted == 0 or not state_bytes or not config.enable_prefix_cache:
        return 0
    if config.kv_cache_bytes is not None:
        room = int(cache_bytes * SNAPSHOT_SHARE)
    else:
        # Leave room for the blocks of one request of full length.
        spare_bytes = cache_bytes - sizes.least_blocks * sizes.block_bytes
        room = max(0, min(int(cache_bytes * SNAPSHOT_SHARE / (1 + SNAPSHOT_SHARE)), spare_bytes))
    return min(room // state_bytes, sizes.num_rows * MAX_SNAPSHOTS_PER_ROW)


def _too_small(
    config: EngineConfig, hardware: Hardware, sizes: _Sizes, num_blocks: int, num_snapshots: int
) -> ConfigError:
    knob, advice, least_blocks = "kv_cache_bytes:", "", sizes.least_blocks
    cache_bytes = config.kv_cache_bytes or num_blocks * sizes.block_bytes
    num_tokens = sizes.reach.capacity(num_blocks, sizes.max_model_len)
    if hardware.device == "cuda" and config.kv_cache_bytes is None:
        knob = f"gpu_memory_fraction: {config.gpu_memory_fraction:g} leaves the cache"
        adapters = config.max_device_adapter_bytes
        kept = "" if adapters is None else f", max_device_adapter_bytes ({adapters}), which are kept for adapters,"
        advice = f" Raise it, or lower max_model_len{kept} or max_batched_tokens ({config.max_batched_tokens})."
    elif config.kv_cache_bytes is None:
        advice = f" {hardware.free_bytes} bytes of memory are free beside the weights; lower max_model_len."
    states_bytes, kept_bytes = sizes.num_rows * sizes.state_bytes, num_snapshots * sizes.state_bytes
    return ConfigError(
        f"{knob} {cache_bytes} bytes, which hold {num_tokens} tokens, fewer than one request of max_model_len "
        f"{sizes.max_model_len}; {least_blocks * sizes.block_bytes} bytes are needed."
        + (f" One block has block_tokens {config.block_tokens}." if config.block_tokens > sizes.max_model_len else "")
        + (f" The states of max_num_seqs {config.max_num_seqs} take {states_bytes} more." if states_bytes else "")
        + (f" Those that are kept take {kept_bytes} (state_cache_bytes)." if kept_bytes else "")
        + advice
    )


def _lent_run_blocks(config: EngineConfig, spec: ModelSpec, hardware: Hardware, element_bytes: int) -> int:
    """Return how many adjacent blocks make a page of one layer's keys; 0 if the cache cannot be lent."""
    stretch_bytes = config.block_tokens * spec.kv_size * element_bytes
    if hardware.device == "cpu" or stretch_bytes % LENT_ALIGNMENT:
        return 0
    return -(-LENT_PAGE_BYTES // stretch_bytes)


def _device_adapter_bytes(config: EngineConfig, hardware: Hardware) -> int:
    if config.max_device_adapter_bytes is not None:
        return config.max_device_adapter_bytes
    if hardware.device == "cpu":
        return _host_adapter_bytes(config, hardware)
    return int(hardware.free_bytes * GPU_ADAPTER_SHARE)


def _dtype(config: EngineConfig, hardware: Hardware) -> str:
    dtype = config.dtype or ("bfloat16" if hardware.has_fast_bfloat16 else "float32")
    if dtype not in BYTES_BY_DTYPE:
        raise ConfigError(f"dtype: {dtype!r} is not one of {', '.join(BYTES_BY_DTYPE)}.")
    if dtype == "float16" and hardware.device == "cpu":
        raise ConfigError("dtype: 'float16' on device 'cpu' can overflow; use bfloat16 or float32.")
    return dtype


def _num_speculative_tokens(config: EngineConfig, hardware: Hardware, *, has_states: bool) -> int:
    if has_states:
        if config.num_speculative_tokens:
            raise ConfigError(
                f"num_speculative_tokens: {config.num_speculative_tokens}, but this model has recurrent layers, "
                "whose states cannot be rolled back after a rejected draft."
            )
        return 0
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return CPU_SPECULATIVE_TOKENS if hardware.device == "cpu" else 0


def _max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    max_model_len = config.max_model_len or spec.max_position
    if max_model_len > spec.max_position:
        raise ConfigError(
            f"max_model_len: {max_model_len} is more than the checkpoint's context of {spec.max_position}."
        )
    return max_model_len


def _host_adapter_bytes(config: EngineConfig, hardware: Hardware) -> int:
    share_bytes = int((hardware.host_bytes - config.kv_host_bytes) * HOST_ADAPTER_SHARE)
    return config.max_host_adapter_bytes or min(share_bytes, MAX_HOST_ADAPTER_BYTES)


def _check_ranges(config: EngineConfig) -> None:
    for name in ("max_num_seqs", "max_batched_tokens", "block_tokens", "max_adapter_rank"):
        value = getattr(config, name)
        if value < 1:
            raise ConfigError(f"{name}: {value} is less than 1.")
    for name in ("num_speculative_tokens", "state_cache_bytes"):
        value = getattr(config, name)
        if value is not None and value < 0:
            raise ConfigError(f"{name}: {value} is less than 0.")
    optional = ("max_model_len", "num_threads", "kv_cache_bytes", "max_prefill_tokens_with_decodes")
    for name in (*optional, "max_device_adapters", "max_device_adapter_bytes", "max_host_adapter_bytes"):
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: {value} is less than 1.")
    if not 0 <= config.max_lent_cache_share <= 1:
        raise ConfigError(f"max_lent_cache_share: {config.max_lent_cache_share} is not between 0 and 1.")
    for name in ("max_decode_gap_s", "max_queue_s"):
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise ConfigError(f"{name}: {value} is not above 0.")


def _quantization(wanted: str | None, spec: ModelSpec, hardware: Hardware, dtype: str) -> str | None:
    """Return the requested quantization, or on a GPU the one that keeps a checkpoint's quantized weights as stored."""
    stored = spec.stored
    if hardware.device != "cuda" or stored is None or not stored.stays:
        return wanted
    if isinstance(stored, StoredInt4):
        if wanted not in (None, "int4"):
            raise ConfigError(f"quantization: {wanted!r}, but the checkpoint's weights have 4 bits already.")
        return "int4"
    can_stay = isinstance(stored, StoredFp8) and _why_not_fp8(spec, hardware, dtype) is None
    return wanted or ("fp8" if can_stay else None)


def _check_quantization(wanted: str | None, spec: ModelSpec, hardware: Hardware, dtype: str) -> None:
    if wanted is None:
        return
    if wanted not in DEVICES_BY_QUANTIZATION:
        raise ConfigError(f"quantization: {wanted!r} is not one of {', '.join(DEVICES_BY_QUANTIZATION)}.")
    device, devices = hardware.device, DEVICES_BY_QUANTIZATION[wanted]
    if device not in devices:
        raise ConfigError(f"quantization: {wanted!r} is for device {devices[0]!r}; this model runs on {device!r}.")
    if wanted == "int4":
        if dtype == "float32" and device == "cuda":
            raise ConfigError("quantization: 'int4' requires 16-bit activations; dtype is 'float32'.")
        complaint = _odd_size(INT4_MULTIPLE_BY_DEVICE[device], {depth for depth, _ in _quantized_sizes(spec)})
    else:
        complaint = _why_not_fp8(spec, hardware, dtype) if wanted == "fp8" else None
    if complaint is not None:
        raise ConfigError(f"quantization: {wanted!r} {complaint}")


def _why_not_fp8(spec: ModelSpec, hardware: Hardware, dtype: str) -> str | None:
    if not hardware.has_fp8_products:
        return "needs a GPU of CUDA's compute capability 9.0 or above; this is none."
    if dtype != "bfloat16":
        return f"makes bfloat16 of its products; dtype is {dtype!r}."
    return _odd_size(FP8_MULTIPLE, {size for shape in _quantized_sizes(spec) for size in shape})


def _quantized_sizes(spec: ModelSpec) -> set[tuple[int, int]]:
    """Return (in, out) of what has to be quantized: of models that run in transformers, whatever fits."""
    return spec.linear_sizes() if isinstance(spec, DecoderSpec) else set()


def _odd_size(multiple: int, sizes: set[int]) -> str | None:
    odd = min((size for size in sizes if size % multiple), default=None)
    return None if odd is None else f"multiplies sizes that {multiple} divides; this model has {odd}."


def _cache_element_bytes(config: EngineConfig, hardware: Hardware, dtype: str) -> int:
    """Return the bytes per element of the KV cache; raise ConfigError if its dtype is not supported."""
    wanted = config.kv_cache_dtype
    if wanted is None:
        return BYTES_BY_DTYPE[dtype]
    if wanted not in CACHE_DTYPES:
        raise ConfigError(f"kv_cache_dtype: {wanted!r} is not one of {', '.join(CACHE_DTYPES)}.")
    if hardware.device == "cpu":
        raise ConfigError(f"kv_cache_dtype: {wanted!r} is for device 'cuda'; this model runs on 'cpu'.")
    if wanted == "fp8" and not hardware.has_fp8:
        raise ConfigError("kv_cache_dtype: 'fp8' needs a GPU that converts e4m3 numbers; take 'int8'.")
    return 1


def _check_tiers(config: EngineConfig, hardware: Hardware, block_bytes: int, *, has_states: bool) -> None:
    for name in ("kv_host_bytes", "kv_disk_bytes"):
        value = getattr(config, name)
        if not value:
            continue
        if value < block_bytes:
            raise ConfigError(f"{name}: {value} bytes cannot hold one block of the KV cache, {block_bytes} bytes.")
        if not config.enable_prefix_cache:
            raise ConfigError(f"{name}: {value}, but enable_prefix_cache is false: nothing would be found there.")
        if has_states:
            raise ConfigError(f"{name}: {value}, but recurrent states, which this model has, are not stored there.")
    if config.kv_disk_folder is not None and not config.kv_disk_bytes:
        raise ConfigError(f"kv_disk_folder: {config.kv_disk_folder!r}, but kv_disk_bytes is 0: nothing would be kept.")
    if config.kv_host_bytes and hardware.device == "cpu":
        raise ConfigError("kv_host_bytes: on device 'cpu' the cache is in the host's memory; raise kv_cache_bytes.")
    if config.kv_host_bytes > hardware.host_bytes:
        raise ConfigError(f"kv_host_bytes: {config.kv_host_bytes}, but {hardware.host_bytes} bytes of memory are free.")
