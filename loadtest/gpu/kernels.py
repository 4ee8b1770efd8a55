"""Every kernel by itself, in the shapes of one layer: what it moves and computes a second, against the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.add_rms_norm.launch import add_rms_norm
from kernels.architecture import fp8_dtype
from kernels.gated_activation.launch import silu_and_multiply
from kernels.launches import BLOCK_TOKENS, GEOMETRIES, Geometry
from kernels.lora_expand.launch import lora_expand
from kernels.lora_shrink.launch import lora_shrink
from kernels.paged_attention.launch import paged_attention
from kernels.rope_kv_write.launch import rope_kv_write
from kernels.row_quantization.launch import quantize_rows
from kernels.streamed_linear.launch import counters, from_int4, streamed_linear
from kernels.streamed_linear.reference import BYTES_PER_WEIGHT, to_int4
from kernels.token_choice.launch import choose_tokens
from loadtest.gpu.timing import Ceilings, GpuTimer

RANK = 16
SHORT = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""What 4-bit weights are multiplied in; the interpreter cannot bfloat16."""
VOCAB = 128_256


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One kernel on inputs of one shape.

    Attributes:
        num_bytes: that it must read and write.
        num_flop: that it must compute in matrix products.
    """

    name: str
    run: Callable[[], object]
    num_bytes: float
    num_flop: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured of one kernel; `of_ceiling` is the floor's time over the measured one."""

    name: str
    us: float
    gb_per_s: float
    tflop_per_s: float
    of_ceiling: float


def benches(geometry: Geometry, device: torch.device, *, scale: int = 1) -> Iterator[Bench]:
    """Yield the kernels of one layer on fresh inputs; `scale` divides batch and context for a trial without a GPU."""
    yield from _elementwise(geometry, device, tokens=8192 // scale)
    for rows, context in ((64, 4096), (1, 8192), (32, 8192)):
        yield _decode_attention(geometry, device, rows=max(1, rows // scale), context=context // scale)
    for held in (torch.int8, fp8_dtype()):
        if held is not None:
            rows, context = max(1, 32 // scale), 8192 // scale
            yield _decode_attention(geometry, device, rows=rows, context=context, held=held)
            yield _quantization(geometry, device, tokens=max(1, 64 // scale), held=held)
    yield _prefill_attention(geometry, device, tokens=8192 // scale)
    for rows in sorted({max(1, rows // scale) for rows in (1, 16, 64)}):
        yield from _products(geometry, device, rows=rows)
    for adapters in (1, 8, 64):
        yield _lora(geometry, device, tokens=max(2, 64 // scale), adapters=max(1, adapters // scale))
    rows = max(1, 64 // scale)
    logits = torch.randn(rows, VOCAB // scale, device=device)
    seeds = torch.arange(2 * rows, device=device).view(rows, 2)
    for name, top_k, top_p in (("", 0, 1.0), (", top-p 0.9", 0, 0.9), (", top-k 40 and top-p 0.9", 40, 0.9)):
        knobs = torch.tensor([[1.0, -torch.inf, top_k, top_p]], dtype=torch.float64, device=device).repeat(rows, 1)
        yield Bench(
            name=f"token choice, {rows} rows of {logits.shape[1]}{name}",
            run=lambda knobs=knobs: choose_tokens(logits, knobs, seeds),  # type: ignore[misc]
            num_bytes=logits.nbytes,
        )


def measure(ceilings: Ceilings) -> list[Figure]:
    """Time the kernels of the Llama-3.1-8B geometry."""
    timer = GpuTimer()
    figures = []
    for bench in benches(GEOMETRIES[0], torch.device("cuda")):
        seconds = timer.seconds(bench.run)
        figures.append(
            Figure(
                name=bench.name,
                us=seconds * 1e6,
                gb_per_s=bench.num_bytes / seconds / 1e9,
                tflop_per_s=bench.num_flop / seconds / 1e12,
                of_ceiling=ceilings.floor_s(bench.num_bytes, bench.num_flop) / seconds,
            )
        )
    return figures


def _elementwise(geometry: Geometry, device: torch.device, *, tokens: int) -> Iterator[Bench]:
    x, delta = (_randn(tokens, geometry.hidden, device=device) for _ in range(2))
    weight = _randn(geometry.hidden, device=device)
    yield Bench(
        name=f"add and norm, {tokens} tokens", run=lambda: add_rms_norm(x, delta, weight, 1e-5), num_bytes=4 * x.nbytes
    )
    gate_up = _randn(tokens, 2 * geometry.inner, device=device)
    yield Bench(
        name=f"gated activation, {tokens} tokens",
        run=lambda: silu_and_multiply(gate_up),
        num_bytes=1.5 * gate_up.nbytes,
    )
    heads = geometry.heads + 2 * geometry.kv_heads
    qkv = _randn(tokens, heads * geometry.head_dim, device=device)
    cos_sin = _randn(tokens, 2, geometry.head_dim, device=device)
    cache = _cache(geometry, tokens, device)
    slots = torch.randperm(tokens, device=device)
    yield Bench(
        name=f"rotate and write, {tokens} tokens",
        run=lambda: rope_kv_write(
            qkv=qkv, cos_sin=cos_sin, norms=None, eps=1e-6, k_cache=cache[0], v_cache=cache[1], slots=slots
        ),
        num_bytes=2 * qkv.nbytes + cos_sin.nbytes,
    )


def _decode_attention(
    geometry: Geometry, device: torch.device, *, rows: int, context: int, held: torch.dtype | None = None
) -> Bench:
    cache, spans = _cache(geometry, rows * context, device), None
    if held is not None:
        flat, found = quantize_rows(cache.view(-1, geometry.head_dim), held)
        cache, found = flat.view(cache.shape), found.view(cache.shape[:-1])
        spans = found[0], found[1]
    per_row = -(-context // BLOCK_TOKENS)
    tables = torch.randperm(rows * per_row, device=device).view(rows, per_row)
    at = torch.arange(rows, device=device)
    table = torch.stack((at, torch.full_like(at, context - 1), torch.ones_like(at), at), dim=1)
    q = _randn(rows, geometry.heads, geometry.head_dim, device=device)
    return Bench(
        name=f"decode attention, {rows} rows of {context}" + ("" if held is None else f", {held} cache"),
        run=lambda: paged_attention(
            q=q, k_cache=cache[0], v_cache=cache[1], rows=table, num_decodes=rows, tables=tables, spans=spans
        ),
        num_bytes=cache.nbytes + (0 if spans is None else 2 * spans[0].nbytes) + 2 * q.nbytes,
        num_flop=4.0 * rows * context * geometry.heads * geometry.head_dim,
    )


def _quantization(geometry: Geometry, device: torch.device, *, tokens: int, held: torch.dtype) -> Bench:
    x = _randn(tokens, geometry.inner, device=device)
    return Bench(
        name=f"row quantization, {tokens} tokens to {held}",
        run=lambda: quantize_rows(x, held),
        num_bytes=x.nbytes + x.numel(),
    )


def _prefill_attention(geometry: Geometry, device: torch.device, *, tokens: int) -> Bench:
    cache = _cache(geometry, tokens, device)
    tables = torch.randperm(-(-tokens // BLOCK_TOKENS), device=device).unsqueeze(0)
    table = torch.tensor([[0, 0, tokens, 0]], device=device)
    q = _randn(tokens, geometry.heads, geometry.head_dim, device=device)
    return Bench(
        name=f"prefill attention, {tokens} tokens",
        run=lambda: paged_attention(q=q, k_cache=cache[0], v_cache=cache[1], rows=table, num_decodes=0, tables=tables),
        num_bytes=2 * q.nbytes + 2 * tokens * geometry.kv_heads * geometry.head_dim * q.element_size(),
        num_flop=2.0 * tokens**2 * geometry.heads * geometry.head_dim,
    )


def _products(geometry: Geometry, device: torch.device, *, rows: int) -> Iterator[Bench]:
    """Each shape of a layer's products by our kernel and by the library, then with weights of 4 bits."""
    hidden, inner = geometry.hidden, geometry.inner
    for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        x, weight = _randn(rows, depth, device=device), _randn(width, depth, device=device)
        arrived = counters(width, rows, device)
        num_flop, others = 2.0 * rows * width * depth, x.nbytes + rows * width * x.element_size()
        where = f", {rows} rows by {width} x {depth}"
        for name, run in (
            ("streamed product", lambda x=x, w=weight, a=arrived: streamed_linear(x, w, None, a)),
            ("the library's product", lambda x=x, w=weight: functional.linear(x, w)),
        ):
            yield Bench(name=name + where, run=run, num_bytes=weight.nbytes + others, num_flop=num_flop)
        x, matrix = x.to(SHORT), to_int4(weight.to(SHORT))
        yield Bench(
            name="int4 product" + where,
            run=lambda x=x, w=matrix, a=arrived: streamed_linear(x, w, None, a),  # type: ignore[misc]
            num_bytes=BYTES_PER_WEIGHT * width * depth + others,
            num_flop=num_flop,
        )
        if rows == 1:
            yield Bench(
                name=f"weights from int4, {width} x {depth}",
                run=lambda w=matrix: from_int4(w),  # type: ignore[misc]
                num_bytes=(BYTES_PER_WEIGHT + 2) * width * depth,
            )


def _lora(geometry: Geometry, device: torch.device, *, tokens: int, adapters: int) -> Bench:
    q_size, kv_size = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    splits = (q_size, kv_size, kv_size)
    x, y = _randn(tokens, geometry.hidden, device=device), _randn(tokens, sum(splits), device=device)
    matrices = [
        (_randn(RANK, geometry.hidden, device=device), _randn(width, RANK, device=device))
        for _ in range(adapters)
        for width in splits
    ]
    tables = torch.tensor([[a.data_ptr(), b.data_ptr(), RANK, 0] for a, b in matrices], device=device)
    per_adapter = tokens // adapters
    segments = torch.tensor(
        [[i * per_adapter, (i + 1) * per_adapter, tables[3 * i].data_ptr()] for i in range(adapters)], device=device
    )
    count = torch.tensor([adapters], device=device)

    def run(kept: object = (matrices, tables)) -> None:
        shrunk = lora_shrink(x, segments, count, entry=0, num_modules=3, max_rank=RANK, max_segments=adapters)
        lora_expand(y, shrunk, segments, count, entry=0, splits=splits, max_segments=adapters)

    num_weights = sum(a.numel() + b.numel() for a, b in matrices)
    return Bench(
        name=f"LoRA of q, k and v, {tokens} tokens of {adapters} adapters",
        run=run,
        num_bytes=num_weights * x.element_size() + x.nbytes + 2 * y.nbytes,
    )


def _cache(geometry: Geometry, tokens: int, device: torch.device) -> torch.Tensor:
    blocks = -(-tokens // BLOCK_TOKENS)
    return _randn(2, blocks, BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim, device=device)


def _randn(*shape: int, device: torch.device) -> torch.Tensor:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(shape, dtype=dtype, device=device)
