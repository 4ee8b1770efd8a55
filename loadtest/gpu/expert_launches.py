"""The launches of `loadtest.gpu.launches` that mixtures of experts make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.architecture import has_fp8_products
from kernels.experts.launch import Change, ExpertMatrix, multiply_by_experts
from kernels.experts.reference import Part
from kernels.experts.routing import Routing, sort_by_expert
from kernels.gated_activation.reference import Activation
from kernels.lora_experts.launch import expert_expand, expert_shrink, fill_row_tables
from kernels.lora_shrink.launch import Tiles
from kernels.streamed_linear.layout import GROUP, SHORT_GROUPS
from loadtest.gpu.meta_tensors import empty, fp8_matrix, int4_matrix, mxfp4_matrix, whole

MAX_RANK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The dimensions of a mixture of experts that a layer's kernels depend on."""

    name: str
    hidden: int
    inner: int
    experts: int
    chosen: int


MIXTURES = (
    Mixture(name="Qwen3-30B-A3B", hidden=2048, inner=768, experts=128, chosen=8),
    Mixture(name="Mixtral-8x7B", hidden=4096, inner=14336, experts=8, chosen=2),
    Mixture(name="Qwen1.5-MoE-A2.7B", hidden=2048, inner=1408, experts=60, chosen=4),
    Mixture(name="the most experts", hidden=2048, inner=512, experts=512, chosen=16),
)
GPT_OSS_MIXTURES = (
    Mixture(name="gpt-oss-20b", hidden=2880, inner=2880, experts=32, chosen=4),
    Mixture(name="gpt-oss-120b", hidden=2880, inner=2880, experts=128, chosen=4),
)


def mixtures() -> None:
    """Launch the kernels of mixtures of experts, for every weight format, with and without expert adapters."""
    for mixture in MIXTURES:
        mix(mixture, torch.bfloat16)
    for mixture in GPT_OSS_MIXTURES:
        mix(mixture, torch.bfloat16, "clamped", has_biases=True)
        mix(mixture, torch.bfloat16, "clamped", matrix=partial(mxfp4_matrix, dtype=torch.bfloat16), has_biases=True)
    for dtype in (torch.float16, torch.float32):
        mix(GPT_OSS_MIXTURES[0], dtype, "clamped", matrix=partial(mxfp4_matrix, dtype=dtype), has_biases=True)
        mix(MIXTURES[0], dtype)
        mix(MIXTURES[0], dtype, change=_change_experts)
    for mixture in (*MIXTURES, GPT_OSS_MIXTURES[0]):
        mix(mixture, torch.bfloat16, change=_change_experts)
    packed = partial(mxfp4_matrix, dtype=torch.bfloat16)
    mix(GPT_OSS_MIXTURES[0], torch.bfloat16, "clamped", matrix=packed, has_biases=True, change=_change_experts)
    for mixture in MIXTURES:
        choice = empty(64, mixture.chosen, dtype=torch.int32), empty(64, mixture.chosen, dtype=torch.float32)
        sort_by_expert(*choice, empty(mixture.experts + 1, dtype=torch.int32), tile=16, decodes=whole(64, 4))
    fill_row_tables(whole(64), Tiles(numbers=whole(64, 3), count=whole(1), most=64), entry=5)
    mix(MIXTURES[0], torch.bfloat16, "gelu")
    for group in (GROUP, *SHORT_GROUPS):
        mix(MIXTURES[0], torch.bfloat16, matrix=partial(int4_matrix, dtype=torch.bfloat16, group=group))
    if has_fp8_products():
        mix(MIXTURES[0], torch.bfloat16, matrix=fp8_matrix)
        mix(MIXTURES[1], torch.bfloat16, matrix=fp8_matrix)


def mix(
    mixture: Mixture,
    dtype: torch.dtype,
    activation: Activation = "silu",
    *,
    matrix: Callable[[int, int], ExpertMatrix] | None = None,
    has_biases: bool = False,
    change: Change | None = None,
) -> None:
    """Launch a mixture of experts for one and two rows, full batches and prompts, on weights made by `matrix`."""
    matrix = matrix or partial(empty, dtype=dtype)
    hidden, inner, experts = mixture.hidden, mixture.inner, mixture.experts
    biases = empty(experts, 2 * inner, dtype=dtype), empty(experts, hidden, dtype=dtype)
    # Covers every tile height.
    for rows in (1 << power for power in range(15)):
        multiply_by_experts(
            empty(rows, hidden, dtype=dtype),
            empty(rows, experts, dtype=dtype),
            matrix(experts * 2 * inner, hidden),
            matrix(experts * hidden, inner),
            empty(experts + 1, dtype=torch.int32),
            chosen=mixture.chosen,
            is_normed=True,
            activation=activation,
            biases=biases if has_biases else None,
            decodes=whole(rows, 4),
            change=change,
        )


def _change_experts(part: Part, routing: Routing, height: int, x: torch.Tensor, y: torch.Tensor) -> None:
    """Launch the adapter kernels for one projection of a mixture."""
    tables = whole(len(routing.experts))
    entry, products = 16 * 3, 2 if part == "gate_up" else 1
    shrunk = expert_shrink(x, routing, tables, entry=entry, products=products, max_rank=MAX_RANK, height=height)
    expert_expand(y, shrunk, routing, tables, entry=entry, height=height)
