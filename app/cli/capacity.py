"""What a model takes of a device and what the device can give it: arithmetic on geometry and data sheets. Pure.

Times are floors (the roofline model: Williams et al., 2009): a step is not faster than its bytes over the memory's
rate, nor than its operations over the matrix units' rate. Engines reach a part of that.
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
"""As the engine has it unless it is told otherwise."""

BYTES_BY_DTYPE = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A device by its data sheet: memory in bytes, bytes a second, dense bfloat16 operations a second.

    Attributes:
        has_fp8_products: it multiplies matrices of 8-bit floats with a scale for each row, at twice the rate.
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
    """What is asked of it.

    Attributes:
        num_adapters: that answers under way use, each with a rank of `rank` on all linear layers.
        price_per_hour: of one device, in any currency; 0 where it is not asked for.
    """

    prompt_tokens: int
    answer_tokens: int
    concurrency: int
    num_adapters: int = 0
    rank: int = 16
    price_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What comes of it.

    Attributes:
        kv_bytes_per_token, cache_tokens: of texts that are no longer than any window.
        max_concurrency: answers of full length that the cache holds at once; 0 where the weights alone do not fit.
        ttft_s: of one prompt that has the device for itself.
        tpot_s: with as many answers under way as are asked for, or as fit where those are fewer.
        tokens_per_s: of answers, prompts counted in.
        cost_per_million: answer tokens, at `price_per_hour`.
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
    """Work out what one device can do for one model, which is `as_kept`."""
    itemsize = BYTES_BY_DTYPE[dtype]
    # A cache of one byte a number is an option of its own (`kv_cache_dtype`), which nobody has asked for here.
    cache_itemsize = max(2, itemsize)
    per_adapter = sum((inputs + outputs) * traffic.rank for inputs, outputs in spec.adapted_shapes().values())
    total_bytes = weight_bytes(spec, itemsize)
    adapter_bytes = float(traffic.num_adapters * per_adapter * cache_itemsize)
    per_token = spec.kv_bytes_per_token(cache_itemsize)
    left = device.memory_bytes * memory_fraction - total_bytes - adapter_bytes
    layout, block_tokens = spec.cache_layout(spec.max_position), BLOCK_TOKENS
    # Some places of a block may be empty, and windows keep whole blocks.
    block_bytes = block_tokens * per_token * layout.num_places / spec.num_layers
    state_bytes = spec.state_bytes(itemsize)
    # States at the ends of prefixes have their share of what those of rows leave.
    block_share = 1 / (1 + SNAPSHOT_SHARE) if state_bytes else 1.0
    cache_tokens = max(0, int(left * block_share // (block_bytes * len(layout.windows)) * block_tokens))
    length = traffic.prompt_tokens + traffic.answer_tokens
    num_blocks = Reach(layout.windows, block_tokens, length).resting(length)
    max_concurrency = max(0, int(left // (num_blocks * block_bytes / block_share + state_bytes)))
    batch = min(traffic.concurrency, max_concurrency)
    # Of each token; products of 8 bits take half the time.
    spared_flop = num_layer_weights(spec) - num_idle_weights(spec) if isinstance(spec.stored, StoredFp8) else 0.0
    # The output matrix is wanted of the last token only.
    first_flop = prompt_flop(spec, traffic.prompt_tokens) + 2.0 * spec.vocab_size * spec.hidden_size
    first_flop -= traffic.prompt_tokens * spared_flop
    ttft_s = max(first_flop / device.flop_per_s, total_bytes / device.bytes_per_s)
    # On the way an answer has, in the middle, half of its tokens.
    step_bytes = step_weight_bytes(spec, itemsize, max(1, batch)) + adapter_bytes
    step_bytes += batch * cache_bytes(spec, traffic.prompt_tokens + traffic.answer_tokens / 2, cache_itemsize)
    # Read and written.
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
    """Return a model as the engine holds it: weights of few bits that it cannot multiply by are numbers."""
    stored, has_products = spec.stored, device.has_fp8_products and dtype == "bfloat16"
    stays = stored is None or (stored.stays and (has_products or not isinstance(stored, StoredFp8)))
    return spec if stays else replace(spec, stored=None)
