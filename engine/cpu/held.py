"""What weights take of a CPU's memory, and what they leave: caches and adapters take shares of that."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from engine.config import EngineConfig, ResolvedConfig
from engine.costs import num_weights
from engine.cpu.called_backend import leaves_experts_to_torch
from engine.decoder.model_spec import ModelSpec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.stored_int4 import StoredInt4
from engine.decoder.stored_mxfp4 import GROUP as MXFP4_GROUP
from engine.decoder.stored_mxfp4 import StoredMxfp4
from engine.errors import ConfigError
from engine.resolve import BYTES_BY_DTYPE, Hardware
from kernels.packed_linear_int4.reference import GROUPS, group_of

_logger = logging.getLogger(__name__)

SCALE_BYTES, ZERO_BYTES = 4, 1


def held_bytes(spec: ModelSpec, config: ResolvedConfig, *, in_panels: bool) -> int:
    """Return the bytes of the weights once they are laid out, without what panels are padded with.

    Args:
        in_panels: our kernels multiply; torch multiplies by dense weights only.
    """
    element_bytes, quantization = BYTES_BY_DTYPE[config.dtype], config.quantization
    held = float(num_weights(spec) * element_bytes)
    if not in_panels:
        return int(held)
    for count, depth, out, stored in _matrices(spec):
        held -= count * out * (depth * element_bytes - _row_bytes(depth, element_bytes, quantization, stored))
    hidden = spec.hidden_size
    if quantization is not None and not hidden % min(GROUPS):
        # The output matrix, as `engine.cpu.panels.lay_out_vocabulary` quantizes it.
        held -= spec.vocab_size * (hidden * element_bytes - hidden - SCALE_BYTES * (hidden // group_of(hidden)))
    return int(held)


def beside_weights(config: EngineConfig, hardware: Hardware, own_bytes: int, draft_bytes: int) -> Hardware:
    """Return the machine with the memory that a model's weights, and those of its draft model, leave.

    Raises:
        ConfigError: they do not fit.
    """
    left = hardware.free_bytes - own_bytes - draft_bytes
    if left <= 0:
        draft = f", those of draft_model {config.draft_model!r} {draft_bytes} bytes" if draft_bytes else ""
        raise ConfigError(
            f"path: the weights of {config.model_path!r} take {own_bytes} bytes of memory{draft}; "
            f"{hardware.free_bytes} bytes are free. Set quantization (int8 or int4) or dtype (bfloat16), if they are "
            "not set yet, or give the process more memory."
        )
    return replace(hardware, free_bytes=left, host_bytes=left)


def warn_if_too_much(spec: ModelSpec, config: ResolvedConfig, cache_bytes: int, left: Hardware) -> None:
    """Log that settings allow more than the weights leave: shares never do, but sizes that were set may."""
    states_bytes = (config.num_rows + config.num_snapshots) * spec.state_bytes(BYTES_BY_DTYPE[config.dtype])
    total_bytes = cache_bytes + states_bytes + config.max_host_adapter_bytes
    if total_bytes > left.free_bytes:
        _logger.warning(
            "once full, the KV cache (kv_cache_bytes), states (state_cache_bytes) and adapters "
            "(max_host_adapter_bytes) take %d bytes of memory; %d are free beside the weights",
            total_bytes,
            left.free_bytes,
        )


def _matrices(spec: ModelSpec) -> Iterator[tuple[int, int, int, Stored | None]]:
    """Yield (number, inputs, outputs, layout that is kept if no other is asked for) of what can be quantized."""
    # What transformers computes is dequantized as it is read.
    stored = spec.stored if isinstance(spec, DecoderSpec) else None
    is_mxfp4 = isinstance(stored, StoredMxfp4)
    for depth, out in spec.linear_shapes().values():
        yield 1, depth, out, None if is_mxfp4 else stored
    mixtures = spec.mixtures()
    are_listed = isinstance(spec, DecoderSpec) and not spec.expert_names.are_one
    if mixtures is None or are_listed or leaves_experts_to_torch(spec):
        return
    count = mixtures.num_layers * mixtures.num_experts
    yield 2 * count, spec.hidden_size, mixtures.inner, stored if is_mxfp4 else None
    yield count, mixtures.inner, spec.hidden_size, stored if is_mxfp4 else None


def _row_bytes(depth: int, element_bytes: int, quantization: str | None, stored: Stored | None) -> float:
    """Return the bytes of the weights of one output, as `engine.cpu.panels.lay_out` holds them."""
    if depth % 2:
        return depth * element_bytes
    if quantization == "int8":
        return depth + SCALE_BYTES
    if isinstance(stored, StoredMxfp4):
        return depth / 2 + SCALE_BYTES * (depth // MXFP4_GROUP)
    if isinstance(stored, StoredInt4) and stored.stays:
        return depth / 2 + (SCALE_BYTES + ZERO_BYTES) * (depth // stored.group(depth))
    if quantization == "int4" and not depth % min(GROUPS):
        return depth / 2 + (SCALE_BYTES + ZERO_BYTES) * (depth // group_of(depth))
    return depth * element_bytes
