"""Estimate a model's memory and speed on a device from its geometry and the device's data sheet. Pure.

Times are lower bounds (the roofline model: Williams et al., 2009): a step takes at least its bytes over the memory
bandwidth and its operations over the peak rate of the matrix units. Real engines are slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine.cache.reach import Reach
from engine.costs import (
    cache_bytes,
    num_idle_weights,
    num_layer_weights,
    num_step_weights,
    prompt_flop,
    step_weight_bytes,
    weight_bytes,
)
from engine.decoder.model_spec import ModelSpec
from engine.decoder.stored_fp8 import StoredFp8
from engine.resolve import SNAPSHOT_SHARE

BLOCK_TOKENS = 16
"""The engine's default."""

BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Data sheet of a device: memory in bytes, bandwidth in bytes/s, dense bfloat16 FLOP/s.

    Attributes:
        has_fp8_products: whether it multiplies FP8 matrices with one scale per row, at twice the bfloat16 rate.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flop_per_s: float
    has_fp8_products: bool = False


DEVICES = {
    device.name: device
    for device in (
        Device(name="l4", memory_bytes=24e9, bytes_per_s=0.3e12, flop_per_s=121e12),
        Device(name="l40s", memory_bytes=48e9, bytes_per_s=0.864e12, flop_per_s=362e12),
        Device(name="a100-80", memory_bytes=80e9, bytes_per_s=2.04e12, flop_per_s=312e12),
        Device(name="h100", memory_bytes=80e9, bytes_per_s=3.35e12, flop_per_s=989e12, has_fp8_products=True),
        Device(name="h200", memory_bytes=141e9, bytes_per_s=4.8e12, flop_per_s=989e12, has_fp8_products=True),
        Device(name="b200", memory_bytes=180e9, bytes_per_s=8.0e12, flop_per_s=2250e12, has_fp8_products=True),
        Device(name="mi300x", memory_bytes=192e9, bytes_per_s=5.3e12, flop_per_s=1307e12),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The workload to plan for.

    Attributes:
        num_adapters: adapters that running answers use, each of rank `rank` on all linear layers.
        price_per_hour: price of one device, in any currency; 0 if costs are not wanted.
    """

    prompt_tokens: int
    answer_tokens: int
    concurrency: int
    num_adapters: int = 0
    rank: int = 16
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """The estimate for one device.

    Attributes:
        kv_bytes_per_token, cache_tokens: for sequences no longer than any attention window.
        max_concurrency: full-length answers that the cache holds at once; 0 if not even one fits beside the weights.
        ttft_s: time to first token of one prompt that has the device to itself.
        tpot_s: time per output token at the requested concurrency, or at `max_concurrency` if that is lower.
        tokens_per_s: answer tokens of all running answers, prefill time included.
        cost_per_million: cost of a million answer tokens at `price_per_hour`.
    """

    weight_bytes: float
    adapter_bytes: float
    kv_bytes_per_token: int
    cache_tokens: int
    max_concurrency: int
    ttft_s: float
    tpot_s: float
    tokens_per_s: float
    cost_per_million: float


def plan(spec: ModelSpec, dtype: str, device: Device, memory_fraction: float, traffic: Traffic) -> Capacity:
    """Return the estimate of one device for a spec that `as_kept` returned."""
    itemsize = BYTES_BY_DTYPE[dtype]
    # An 8-bit KV cache is a separate option (`kv_cache_dtype`), not considered here.
    cache_itemsize = max(2, itemsize)
    per_adapter = sum((inputs + outputs) * traffic.rank for inputs, outputs in spec.adapted_shapes().values())
    total_bytes = weight_bytes(spec, itemsize)
    adapter_bytes = float(traffic.num_adapters * per_adapter * cache_itemsize)
    per_token = spec.kv_bytes_per_token(cache_itemsize)
    left = device.memory_bytes * memory_fraction - total_bytes - adapter_bytes
    layout, block_tokens = spec.cache_layout(spec.max_position), BLOCK_TOKENS
    # Some layer slots of a block may be unused, and sliding windows keep whole blocks.
    block_bytes = block_tokens * per_token * layout.num_places / spec.num_layers
    state_bytes = spec.state_bytes(itemsize)
    # Snapshots of states for the prefix cache get a share of the memory that the states of running rows leave.
    block_share = 1 / (1 + SNAPSHOT_SHARE) if state_bytes else 1.0
    cache_tokens = max(0, int(left * block_share // (block_bytes * len(layout.windows)) * block_tokens))
    length = traffic.prompt_tokens + traffic.answer_tokens
    num_blocks = Reach(layout.windows, block_tokens, length).resting(length)
    max_concurrency = max(0, int(left // (num_blocks * block_bytes / block_share + state_bytes)))
    batch = min(traffic.concurrency, max_concurrency)
    # FLOP saved per token: FP8 products take half the time.
    spared_flop = num_layer_weights(spec) - num_idle_weights(spec) if isinstance(spec.stored, StoredFp8) else 0.0
    # Only the last token needs the output matrix.
    first_flop = prompt_flop(spec, traffic.prompt_tokens) + 2.0 * spec.vocab_size * spec.hidden_size
    first_flop -= traffic.prompt_tokens * spared_flop
    ttft_s = max(first_flop / device.flop_per_s, total_bytes / device.bytes_per_s)
    # A running answer has half of its tokens on average.
    step_bytes = step_weight_bytes(spec, itemsize, max(1, batch)) + adapter_bytes
    step_bytes += batch * cache_bytes(spec, traffic.prompt_tokens + traffic.answer_tokens / 2, cache_itemsize)
    # States are read and written.
    step_bytes += batch * 2.0 * state_bytes
    step_flop = batch * (2.0 * num_step_weights(spec) - spared_flop)
    tpot_s = max(step_bytes / device.bytes_per_s, step_flop / device.flop_per_s)
    answer_s = traffic.answer_tokens * tpot_s / batch + ttft_s if batch else float("inf")
    tokens_per_s = traffic.answer_tokens / answer_s
    cost = traffic.price_per_hour / (tokens_per_s * 3600) * 1e6 if tokens_per_s else float("inf")
    return Capacity(
        weight_bytes=total_bytes,
        adapter_bytes=adapter_bytes,
        kv_bytes_per_token=per_token,
        cache_tokens=cache_tokens,
        max_concurrency=max_concurrency,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        tokens_per_s=tokens_per_s,
        cost_per_million=cost,
    )


def as_kept(spec: ModelSpec, dtype: str, device: Device) -> ModelSpec:
    """Return the spec as the engine holds it: quantized weights that the device cannot multiply are dequantized."""
    stored, has_products = spec.stored, device.has_fp8_products and dtype == "bfloat16"
    stays = stored is None or (stored.stays and (has_products or not isinstance(stored, StoredFp8)))
    return spec if stays else replace(spec, stored=None)
