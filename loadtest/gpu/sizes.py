"""The sizes of well-known models that benchmarks of kernels are for."""

from __future__ import annotations

from dataclasses import dataclass

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The dimensions of a model that a layer's kernels depend on."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The dimensions of a mixture of experts that a layer's kernels depend on."""

    name: str
    hidden: int
    inner: int
    experts: int
    chosen: int


LLAMA = Geometry(name="Llama-3.1-8B", hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128)
QWEN_3_MOE = Mixture(name="Qwen3-30B-A3B", hidden=2048, inner=768, experts=128, chosen=8)
GPT_OSS = Mixture(name="gpt-oss-20b", hidden=2880, inner=2880, experts=32, chosen=4)
