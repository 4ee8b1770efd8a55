"""Adapters of every kind for a base of two layers, and their way to a device."""

from __future__ import annotations

import torch

from adapters.tensor_names import WHOLE_MODEL
from adapters.weights import AdapterWeights, Columns, Extras, RawProjection
from engine.gpu.tabled_adapter import TabledAdapter
from tests.adapters.handmade import packed
from tests.kernels.gpu.conftest import DEVICE

HIDDEN, VOCAB, INNER, LAYERS, MAX_RANK = 32, 40, 24, 2, 8


def raw(rank: int, width: int, depth: int) -> RawProjection:
    return RawProjection(a=torch.randn(rank, depth), b=torch.randn(width, rank), scaling=0.5)


def gains() -> Columns:
    return Columns(gain=torch.rand(HIDDEN) + 0.5, shift=torch.zeros(HIDDEN))


def make_sources() -> dict[str, AdapterWeights]:
    torch.manual_seed(0)
    plain = {(1, "up_proj"): raw(3, INNER, HIDDEN)}
    biased = Columns(gain=torch.rand(INNER), shift=torch.randn(INNER))
    own = {name: torch.randn(VOCAB, HIDDEN) for name in ("embed_tokens", "lm_head")}
    ends = {(WHOLE_MODEL, "embed_tokens"): raw(5, HIDDEN, VOCAB), (WHOLE_MODEL, "lm_head"): raw(8, VOCAB, HIDDEN)}
    norms = {(WHOLE_MODEL, "norm"): gains(), (0, "input_layernorm"): gains(), (1, "post_attention_layernorm"): gains()}
    return {
        "plain": packed(plain, torch.float32, Extras(columns={(1, "up_proj"): biased})),
        "own": packed(plain, torch.float32, Extras(matrices=own)),
        "products": packed({**plain, **ends}, torch.float32),
        "norms": packed({}, torch.float32, Extras(columns=norms)),
    }


def tabled(sources: dict[str, AdapterWeights], page_bytes: int = 0) -> dict[str, AdapterWeights]:
    device = DEVICE
    adapters = {name: TabledAdapter.of(source, LAYERS, page_bytes=page_bytes) for name, source in sources.items()}
    return {
        name: adapter.to(device, [torch.full((page_bytes,), 255, dtype=torch.uint8, device=device) for _ in range(num)])
        for name, adapter in adapters.items()
        for num in [adapter.num_pages]
    }
