"""All GPU kernel launches that serving makes, for the geometries of commonly served models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from kernels.add_rms_norm.launch import add_rms_norm
from kernels.architecture import fp8_dtype, has_fp8_products, pretending
from kernels.embedding.launch import put_drawn, take_rows
from kernels.gated_activation.launch import MAX_ROUNDED_WIDTH, activate_and_multiply
from kernels.lora_expand.launch import lora_expand
from kernels.lora_gather.launch import lora_gather
from kernels.lora_logits.launch import lora_logits
from kernels.lora_shrink.launch import Tiles, lora_shrink
from kernels.paged_attention.launch import MAX_PROGRAMS, paged_attention
from kernels.recording import Launch, recording
from kernels.rope_attention.launch import can_attend, rope_attention
from kernels.rope_kv_write.launch import rope_kv_write
from kernels.row_quantization.launch import empty_rounded, quantize_rows
from kernels.streamed_linear.launch import (
    MAX_ROWS,
    MAX_WIDE_INT4_ROWS,
    MAX_WIDE_ROWS,
    from_int4,
    row_linear,
    streamed_linear,
    tile_cut,
    wide_cut,
)
from kernels.streamed_linear.layout import GROUP, SHORT_GROUPS
from kernels.streamed_linear.reference import FP8, Fp8Matrix
from kernels.token_choice.launch import choose_tokens
from loadtest.gpu.expert_launches import MAX_RANK, mixtures
from loadtest.gpu.meta_tensors import empty, fp8_matrix, int4_matrix, whole
from loadtest.gpu.state_launches import keep_states

BLOCK_TOKENS, NUM_BLOCKS, VOCAB = 16, 1024, 128256
UNEVEN_VOCAB = 50257
"""GPT-2's, no multiple of 16."""
BATCHES = ((1, 1), (64, 64), (2048, 64))
"""Tokens of a step, and how many of them are single-token (decode) rows."""
MANY = (1024, 1024)
"""A step of more single-token rows than usual, for which attention is tiled in another way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """The dimensions of a model that a layer's kernels depend on."""

    name: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    has_norms: bool = False


WIDEST = (16384, 28672)
"""Widths whose quantization has least room: the MLP width of Llama-3.1-70B, 28672, is the largest on one GPU."""

GEOMETRIES = (
    Geometry(name="Llama-3.1-8B", hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128),
    Geometry(name="Qwen3-0.6B", hidden=1024, inner=3072, heads=16, kv_heads=8, head_dim=128, has_norms=True),
    Geometry(name="Qwen2.5-0.5B", hidden=896, inner=4864, heads=14, kv_heads=2, head_dim=64),
    Geometry(name="head size 80", hidden=2560, inner=10240, heads=32, kv_heads=32, head_dim=80),
    Geometry(name="head size 96", hidden=3072, inner=8192, heads=32, kv_heads=32, head_dim=96),
    Geometry(name="head size 256", hidden=2048, inner=16384, heads=8, kv_heads=1, head_dim=256),
)


GPT_OSS = Geometry(name="gpt-oss", hidden=2880, inner=2880, heads=64, kv_heads=8, head_dim=64)
GEMMA_2 = Geometry(name="Gemma-2-2B", hidden=2304, inner=9216, heads=8, kv_heads=4, head_dim=256)
WIDEST_HEADS = (
    Geometry(name="head size 512", hidden=2816, inner=2112, heads=16, kv_heads=2, head_dim=512),
    Geometry(name="head size 512, 8 heads", hidden=2560, inner=10240, heads=8, kv_heads=2, head_dim=512),
)
GEMMA_3 = Geometry(name="Gemma-3-1B", hidden=1152, inner=6912, heads=4, kv_heads=1, head_dim=256, has_norms=True)


def all_launches(target: str) -> list[Launch]:
    """Return each kernel specialization for a GPU once.

    Every geometry is covered in bfloat16, the first one also in float16 and float32.
    """
    with pretending(target), recording() as launches:
        for geometry in GEOMETRIES:
            layer(geometry, torch.bfloat16)
        layer(GEOMETRIES[0], torch.float16)
        layer(GEOMETRIES[0], torch.float32)
        attend(GEOMETRIES[0], torch.bfloat16, torch.bfloat16, rotary_dim=96)
        attend(WIDEST_HEADS[0], torch.float32, torch.float32)
        attend(WIDEST_HEADS[0], torch.bfloat16, torch.bfloat16, window=4096)
        gemma(GEMMA_3, window=512)
        gemma(GEMMA_2, window=4096, softcap=50.0)
        for held in (torch.bfloat16, torch.int8, fp8_dtype()):
            if held is not None:
                gpt_oss_attention(held)
                attend(GEOMETRIES[0], torch.bfloat16, held, batches=(MANY,))
                attend(GEOMETRIES[0], torch.bfloat16, held, window=4096, softcap=50.0)
                # Of Gemma 4's layers without a window.
                for geometry in WIDEST_HEADS:
                    attend(geometry, torch.bfloat16, held)
                # Sliding windows as in Mistral and Phi-3.
                for geometry in (GEOMETRIES[0], *GEOMETRIES[2:5]):
                    attend(geometry, torch.bfloat16, held, window=4096)
        for held in (torch.int8, fp8_dtype()):
            if held is not None:
                attend(GEMMA_2, torch.bfloat16, held, window=4096, softcap=50.0)
                attend(GEMMA_3, torch.bfloat16, held, window=512)
                for geometry in GEOMETRIES:
                    attend(geometry, torch.bfloat16, held)
                    for width in (geometry.hidden, geometry.inner):
                        quantize_rows(empty(64, width, dtype=torch.bfloat16), held)
        for geometry in GEOMETRIES[:2]:
            multiply(geometry, torch.bfloat16)
        if has_fp8_products():
            for geometry in GEOMETRIES[:2]:
                multiply_fp8(geometry)
            for width in WIDEST:
                round_fp8(64, width)
        mixtures()
        keep_states()
        multiply(GEOMETRIES[0], torch.float16)
        for group in SHORT_GROUPS:
            multiply(GEOMETRIES[0], torch.bfloat16, group)
        for vocab in (VOCAB, UNEVEN_VOCAB):
            logits, knobs = empty(64, vocab, dtype=torch.float32), empty(64, 4, dtype=torch.float64)
            choose_tokens(logits, knobs, whole(64, 2), empty(64, dtype=torch.int32))
    return launches


def multiply(geometry: Geometry, dtype: torch.dtype, group: int = GROUP) -> None:
    """Launch a layer's linear products of few rows, with unquantized weights and grouped 4-bit weights."""
    arrived = empty(1 << 16, dtype=torch.int32)
    for name, width, depth, has_bias in _products(geometry):
        held = int4_matrix(width, depth, dtype, group)
        bias = empty(width, dtype=dtype) if has_bias else None
        for rows in (1, 32, 64):
            x = empty(rows, depth, dtype=dtype)
            for cut in (None, wide_cut(x, held)) if rows <= MAX_WIDE_INT4_ROWS else (None,):
                streamed_linear(x, held, bias, arrived, cut)
        dense = empty(width, depth, dtype=dtype)
        streamed_linear(empty(16, depth, dtype=dtype), dense, bias, arrived)
        for rows in (32, 64):
            for is_wide in (False, True):
                cut = tile_cut(rows, width, depth, dtype.itemsize, is_wide=is_wide)
                streamed_linear(empty(rows, depth, dtype=dtype), dense, bias, arrived, cut)
        multiply_rows(name, dense, bias, width, depth)
        from_int4(held)


def multiply_fp8(geometry: Geometry) -> None:
    """Launch all variants of a layer's linear products of few rows with FP8 weights, and the quantization of inputs."""
    dtype, arrived = torch.bfloat16, empty(1 << 16, dtype=torch.int32)
    for name, width, depth, has_bias in _products(geometry):
        matrix = fp8_matrix(width, depth)
        bias = empty(width, dtype=dtype) if has_bias else None
        for rows in (1, 32, 64, 128):
            x = empty(rows, depth, dtype=dtype)
            round_fp8(rows, depth)
            for is_wide in (False, True) if rows <= MAX_WIDE_ROWS else (False,):
                streamed_linear(x, matrix, bias, arrived, tile_cut(rows, width, depth, 1, is_wide=is_wide))
        multiply_rows(name, matrix, bias, width, depth)


def multiply_rows(
    name: str, weight: torch.Tensor | Fp8Matrix, bias: torch.Tensor | None, width: int, depth: int
) -> None:
    """Launch a linear product of one or two rows, alone and fused with the preceding norm or the residual sum."""
    dtype = torch.bfloat16 if isinstance(weight, Fp8Matrix) else weight.dtype
    for rows in range(1, MAX_ROWS + 1):
        x, is_gated = empty(rows, depth, dtype=dtype), name == "gate_up"
        row_linear(x, weight, bias, is_gated=is_gated)
        if name in ("qkv", "gate_up"):
            row_linear(x, weight, bias, norm=(empty(depth, dtype=dtype), 1e-5), is_gated=is_gated)
        else:
            row_linear(x, weight, bias, out=empty(rows, width, dtype=dtype), is_added=True)


def round_fp8(rows: int, width: int) -> None:
    """Launch the kernels that quantize inputs of FP8 products."""
    x = empty(rows, width, dtype=torch.bfloat16)
    quantize_rows(x, FP8)
    # No model has a larger hidden size.
    if width <= MAX_ROUNDED_WIDTH:
        norm = empty(width, dtype=torch.bfloat16)
        add_rms_norm(x, x, norm, 1e-5, empty_rounded(x, FP8))
        add_rms_norm(x, None, norm, 1e-5, empty_rounded(x, FP8))
        activate_and_multiply(empty(rows, 2 * width, dtype=torch.bfloat16), "silu", empty_rounded(x, FP8))


def _products(geometry: Geometry) -> Iterator[tuple[str, int, int, bool]]:
    """Yield (name, outputs, inputs, has bias) for each linear product of a layer."""
    hidden, inner = geometry.hidden, geometry.inner
    yield "qkv", (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim, hidden, geometry.has_norms
    yield "o", hidden, hidden, False
    yield "gate_up", 2 * inner, hidden, False
    yield "down", hidden, inner, False


def attend(
    geometry: Geometry,
    dtype: torch.dtype,
    held: torch.dtype,
    *,
    window: int = 0,
    softcap: float = 0.0,
    norm_dtype: torch.dtype | None = None,
    rotary_dim: int | None = None,
    has_sinks: bool = False,
    batches: Sequence[tuple[int, int]] = BATCHES,
) -> None:
    """Launch the kernels that write and read a layer's KV cache of dtype `held`."""
    head_dim, kv_heads = geometry.head_dim, geometry.kv_heads
    cache = empty(NUM_BLOCKS, BLOCK_TOKENS, kv_heads, head_dim, dtype=held)
    part = empty(NUM_BLOCKS, BLOCK_TOKENS, kv_heads, dtype=torch.float32)
    spans = None if held == dtype else (part, part)
    norm = empty(head_dim, dtype=norm_dtype or dtype)
    for tokens, num_decodes in batches:
        qkv = empty(tokens, (geometry.heads + 2 * kv_heads) * head_dim, dtype=dtype)
        cos_sin, slots = empty(tokens, 2, head_dim, dtype=dtype), whole(tokens)
        norms = (norm, norm) if geometry.has_norms else None
        rows, tables = whole(num_decodes + (tokens > num_decodes), 4), whole(64, 512)
        arrived = empty(MAX_PROGRAMS, dtype=torch.int32)
        write = partial(rope_kv_write, qkv=qkv, cos_sin=cos_sin, eps=1e-6, k_cache=cache, v_cache=cache, slots=slots)
        q = write(norms=norms, rotary_dim=rotary_dim, spans=spans)
        if norms is not None:
            # Per-token norms, for adapters that bring their own.
            own = empty(tokens, 2 * head_dim, dtype=norm.dtype).split(head_dim, dim=1)
            write(norms=own, rotary_dim=rotary_dim, spans=spans)
        paged_attention(
            q=q,
            k_cache=cache,
            v_cache=cache,
            rows=rows,
            num_decodes=num_decodes,
            tables=tables,
            arrived=arrived,
            window=window,
            softcap=softcap,
            spans=spans,
            sinks=empty(geometry.heads, dtype=torch.float32) if has_sinks else None,
        )
        if can_attend(qkv, cache):
            rope_attention(
                qkv=qkv,
                cos_sin=cos_sin,
                norms=norms,
                eps=1e-6,
                k_cache=cache,
                v_cache=cache,
                slots=slots,
                rows=rows,
                tables=tables,
                arrived=arrived,
            )


def gpt_oss_attention(held: torch.dtype) -> None:
    """Launch attention with sinks, with and without a window."""
    for window in (0, 128):
        attend(GPT_OSS, torch.bfloat16, held, window=window, has_sinks=True)


def gemma(geometry: Geometry, *, window: int, softcap: float = 0.0) -> None:
    """Launch what is specific to Gemma layers: float32 norm weights, GELU, windows, soft caps."""
    attend(geometry, torch.bfloat16, torch.bfloat16, softcap=softcap, norm_dtype=torch.float32)
    attend(geometry, torch.bfloat16, torch.bfloat16, window=window, softcap=softcap)
    for tokens, _ in BATCHES:
        x, weight = empty(tokens, geometry.hidden, dtype=torch.bfloat16), empty(geometry.hidden, dtype=torch.float32)
        add_rms_norm(x, x, weight, 1e-6)
        add_rms_norm(x, None, weight, 1e-6)
        activate_and_multiply(empty(tokens, 2 * geometry.inner, dtype=torch.bfloat16), "gelu")


def layer(geometry: Geometry, dtype: torch.dtype) -> None:
    """Launch the kernels of one layer, for one token, a full batch, and prompts."""
    hidden, inner, head_dim = geometry.hidden, geometry.inner, geometry.head_dim
    q_size, kv_size = geometry.heads * head_dim, geometry.kv_heads * head_dim
    attend(geometry, dtype, dtype)
    for tokens, _ in BATCHES:
        put_drawn(whole(tokens), whole(tokens, 4), whole(64), -1)
        x = take_rows(empty(VOCAB, hidden, dtype=dtype), whole(tokens))
        take_rows(empty(VOCAB, 2, head_dim, dtype=dtype), whole(tokens))
        add_rms_norm(x, x, empty(hidden, dtype=dtype), 1e-5)
        add_rms_norm(x, None, empty(hidden, dtype=dtype), 1e-5)
        activate_and_multiply(empty(tokens, 2 * inner, dtype=dtype), "silu")
        for width, splits in ((hidden, (q_size, kv_size, kv_size)), (hidden, (inner, inner)), (inner, (hidden,))):
            y = empty(tokens, sum(splits), dtype=dtype)
            _change(empty(tokens, width, dtype=dtype), y, splits, entry=16)
        whole_model(tokens, hidden, dtype)


def whole_model(tokens: int, hidden: int, dtype: torch.dtype) -> None:
    """Launch the adapter kernels for the embedding, norms and the output matrix."""
    x, logits = empty(tokens, hidden, dtype=dtype), empty(tokens, VOCAB, dtype=torch.float32)
    tiles = _tiles(tokens)
    lora_gather(whole(tokens), x, tiles, own=0, entry=1)
    no_product = empty(1, tokens, 1, MAX_RANK, dtype=torch.float32)
    lora_expand(x, no_product, tiles, entry=2, splits=(hidden,))
    lora_logits(x, logits, tiles, entry=3)
    _change(x, logits, (VOCAB,), entry=4)


def _change(x: torch.Tensor, y: torch.Tensor, splits: Sequence[int], *, entry: int) -> None:
    """Launch the LoRA products of adjacent modules."""
    tiles = _tiles(len(x))
    shrunk = lora_shrink(x, tiles, entry=entry, num_modules=len(splits), max_rank=MAX_RANK)
    lora_expand(y, shrunk, tiles, entry=entry, splits=splits, dtype=x.dtype)


def _tiles(tokens: int) -> Tiles:
    return Tiles(numbers=whole(64, 3), count=whole(1), most=min(tokens, 64))
