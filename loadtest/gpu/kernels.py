"""Every kernel by itself, in the shapes of one layer: what it moves and computes a second, against the ceilings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from kernels.add_rms_norm.launch import add_rms_norm
from kernels.architecture import fp8_dtype, has_fp8_products
from kernels.gated_activation.launch import silu_and_multiply
from kernels.launches import BLOCK_TOKENS, Geometry
from kernels.lora_expand.launch import lora_expand
from kernels.lora_shrink.launch import lora_shrink, whole_rows
from kernels.paged_attention.launch import Tile, paged_attention
from kernels.rope_kv_write.launch import rope_kv_write
from kernels.row_quantization.launch import quantize_rows
from kernels.streamed_linear.launch import counters, from_int4, streamed_linear
from kernels.streamed_linear.layout import BYTES_PER_WEIGHT
from kernels.streamed_linear.reference import to_int4
from kernels.token_choice.launch import choose_tokens
from loadtest.gpu.parts import Attempt
from loadtest.gpu.timing import Ceilings, Timer

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


def benches(
    geometry: Geometry, device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext
) -> Iterator[Bench]:
    """Yield the kernels of one layer on fresh inputs; `scale` divides batch and context for a trial without a GPU."""
    decoding = partial(_decode_attention, geometry, device)
    held_types = [held for held in (torch.int8, fp8_dtype()) if held is not None]
    few, some, many = max(1, 32 // scale), max(1, 64 // scale), 8192 // scale
    families = [
        _elementwise(geometry, device, tokens=many),
        *(decoding(rows=max(1, rows // scale), context=n // scale) for rows, n in ((64, 4096), (1, 8192), (32, 8192))),
        *(decoding(rows=few, context=many, held=held) for held in held_types),
        *(_quantization(geometry, device, tokens=some, held=held) for held in held_types),
        decoding(rows=max(2, some), context=512 // scale, longest=32_768 // scale),
        _prefill_attention(geometry, device, tokens=many),
        _torch_decode_attention(geometry, device, rows=few, context=many),
        *(_products(geometry, device, rows=rows) for rows in sorted({max(1, rows // scale) for rows in (1, 16, 64)})),
        *(_library_products(geometry, device, rows=max(1, rows // scale)) for rows in (64, 8192)),
        *(_lora(geometry, device, tokens=max(2, some), adapters=max(1, adapters // scale)) for adapters in (1, 8, 64)),
        _token_choices(device, rows=some, vocab=VOCAB // scale),
    ]
    for family in families:
        with attempt("inputs"):
            yield from family


def measure(
    found: Iterable[Bench], ceilings: Ceilings, timer: Timer, attempt: Attempt = nullcontext
) -> Iterator[Figure]:
    """Time each and yield it as it is done."""
    for bench in found:
        with attempt(bench.name):
            seconds = timer.seconds(bench.run)
            yield Figure(
                name=bench.name,
                us=seconds * 1e6,
                gb_per_s=bench.num_bytes / seconds / 1e9,
                tflop_per_s=bench.num_flop / seconds / 1e12,
                of_ceiling=ceilings.floor_s(bench.num_bytes, bench.num_flop) / seconds,
            )


def _elementwise(geometry: Geometry, device: torch.device, *, tokens: int) -> Iterator[Bench]:
    x, delta = (random_numbers(tokens, geometry.hidden, device=device) for _ in range(2))
    weight = random_numbers(geometry.hidden, device=device)
    yield Bench(
        name=f"add and norm, {tokens} tokens", run=lambda: add_rms_norm(x, delta, weight, 1e-5), num_bytes=4 * x.nbytes
    )
    gate_up = random_numbers(tokens, 2 * geometry.inner, device=device)
    yield Bench(
        name=f"gated activation, {tokens} tokens",
        run=lambda: silu_and_multiply(gate_up),
        num_bytes=1.5 * gate_up.nbytes,
    )
    heads = geometry.heads + 2 * geometry.kv_heads
    qkv = random_numbers(tokens, heads * geometry.head_dim, device=device)
    cos_sin = random_numbers(tokens, 2, geometry.head_dim, device=device)
    cache = _cache(geometry, tokens, device)
    slots = torch.randperm(tokens, device=device)
    yield Bench(
        name=f"rotate and write, {tokens} tokens",
        run=lambda: rope_kv_write(
            qkv=qkv, cos_sin=cos_sin, norms=None, eps=1e-6, k_cache=cache[0], v_cache=cache[1], slots=slots
        ),
        num_bytes=2 * qkv.nbytes + cos_sin.nbytes,
    )


def attention_inputs(
    geometry: Geometry,
    device: torch.device,
    *,
    rows: int,
    context: int,
    held: torch.dtype | None = None,
    longest: int = 0,
) -> tuple[Callable[[tuple[Tile, int] | None], torch.Tensor], float]:
    """Return what attends for rows of one token over `context` keys each, by a cut, and the bytes that it must move.

    The first row may have `longest` keys, which it shares with others.
    """
    cache, spans = _cache(geometry, rows * context, device), None
    if held is not None:
        flat, found = quantize_rows(cache.view(-1, geometry.head_dim), held)
        cache, found = flat.view(cache.shape), found.view(cache.shape[:-1])
        spans = found[0], found[1]
    per_row = -(-context // BLOCK_TOKENS)
    tables = torch.randperm(rows * per_row, device=device).view(rows, per_row)
    at = torch.arange(rows, device=device)
    table = torch.stack((at, torch.full_like(at, context - 1), torch.ones_like(at), at), dim=1)
    if longest:
        others = tables.flatten()[torch.arange(longest // BLOCK_TOKENS, device=device) % tables.numel()]
        tables = torch.cat((tables, others.expand(rows, -1)), dim=1)
        table[0, 1] = longest - 1
    q = random_numbers(rows, geometry.heads, geometry.head_dim, device=device)
    num_bytes = cache.nbytes * (1 + max(0, longest - context) / (rows * context)) + 2 * q.nbytes
    return lambda cut: paged_attention(
        q=q, k_cache=cache[0], v_cache=cache[1], rows=table, num_decodes=rows, tables=tables, spans=spans, cut=cut
    ), num_bytes + (0 if spans is None else 2 * spans[0].nbytes)


def _decode_attention(
    geometry: Geometry,
    device: torch.device,
    *,
    rows: int,
    context: int,
    held: torch.dtype | None = None,
    longest: int = 0,
) -> Iterator[Bench]:
    attend, num_bytes = attention_inputs(geometry, device, rows=rows, context=context, held=held, longest=longest)
    name = f"decode attention, {rows} rows of {context}" + (f", one of them of {longest}" if longest else "")
    yield Bench(
        name=name + ("" if held is None else f", {held} cache"),
        run=lambda: attend(None),
        num_bytes=num_bytes,
        num_flop=4.0 * (rows * context + max(0, longest - context)) * geometry.heads * geometry.head_dim,
    )


def _quantization(geometry: Geometry, device: torch.device, *, tokens: int, held: torch.dtype) -> Iterator[Bench]:
    x = random_numbers(tokens, geometry.inner, device=device)
    yield Bench(
        name=f"row quantization, {tokens} tokens to {held}",
        run=lambda: quantize_rows(x, held),
        num_bytes=x.nbytes + x.numel(),
    )


def _torch_decode_attention(geometry: Geometry, device: torch.device, *, rows: int, context: int) -> Iterator[Bench]:
    """What torch has for it, over keys and values that lie one after the other."""
    q = random_numbers(rows, geometry.heads, 1, geometry.head_dim, device=device)
    k, v = random_numbers(2, rows, geometry.kv_heads, context, geometry.head_dim, device=device)
    yield Bench(
        name=f"torch's decode attention, {rows} rows of {context}",
        run=lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        num_bytes=2 * k.nbytes + 2 * q.nbytes,
        num_flop=4.0 * rows * context * geometry.heads * geometry.head_dim,
    )


def _prefill_attention(geometry: Geometry, device: torch.device, *, tokens: int) -> Iterator[Bench]:
    cache = _cache(geometry, tokens, device)
    tables = torch.randperm(-(-tokens // BLOCK_TOKENS), device=device).unsqueeze(0)
    table = torch.tensor([[0, 0, tokens, 0]], device=device)
    q = random_numbers(tokens, geometry.heads, geometry.head_dim, device=device)
    num_bytes = 2 * q.nbytes + 2 * tokens * geometry.kv_heads * geometry.head_dim * q.element_size()
    num_flop = 2.0 * tokens**2 * geometry.heads * geometry.head_dim
    yield Bench(
        name=f"prefill attention, {tokens} tokens",
        run=lambda: paged_attention(q=q, k_cache=cache[0], v_cache=cache[1], rows=table, num_decodes=0, tables=tables),
        num_bytes=num_bytes,
        num_flop=num_flop,
    )
    k, v = random_numbers(2, 1, geometry.kv_heads, tokens, geometry.head_dim, device=device)
    dense = q.transpose(0, 1).unsqueeze(0)
    yield Bench(
        name=f"torch's prefill attention, {tokens} tokens",
        run=lambda: functional.scaled_dot_product_attention(dense, k, v, is_causal=True, enable_gqa=True),
        num_bytes=num_bytes,
        num_flop=num_flop,
    )


def _products(geometry: Geometry, device: torch.device, *, rows: int) -> Iterator[Bench]:
    """Each shape of a layer's products by our kernel and by the library, then with weights of 4 bits."""
    hidden, inner = geometry.hidden, geometry.inner
    for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        x, weight = random_numbers(rows, depth, device=device), random_numbers(width, depth, device=device)
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


def _library_products(geometry: Geometry, device: torch.device, *, rows: int) -> Iterator[Bench]:
    """What prompts wait for: the library's products of the widest shape, with weights of 16 bits and of 8.

    Those of 8 bits are added up in float32, as the engine has them, or in fewer bits, which is faster.
    """
    width, depth = 2 * geometry.inner, geometry.hidden
    x, weight = random_numbers(rows, depth, device=device), random_numbers(width, depth, device=device)
    where, num_flop = f", {rows} rows by {width} x {depth}", 2.0 * rows * width * depth
    others = rows * width * x.element_size()
    yield Bench(
        name="the library's large product" + where,
        run=lambda: functional.linear(x, weight),
        num_bytes=x.nbytes + weight.nbytes + others,
        num_flop=num_flop,
    )
    if not has_fp8_products():
        return
    x8, x_spans = quantize_rows(x, torch.float8_e4m3fn)
    w8, w_spans = quantize_rows(weight, torch.float8_e4m3fn)
    scales = {"scale_a": x_spans.unsqueeze(1), "scale_b": w_spans.unsqueeze(0)}
    for name, is_fast in (("", False), (" added up fast", True)):
        yield Bench(
            name=f"the library's fp8 product{name}{where}",
            run=partial(torch._scaled_mm, x8, w8.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast),
            num_bytes=x8.nbytes + w8.nbytes + others,
            # Against the ceiling of bfloat16, so that twice of it can be reached.
            num_flop=num_flop,
        )


def _lora(geometry: Geometry, device: torch.device, *, tokens: int, adapters: int) -> Iterator[Bench]:
    q_size, kv_size = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    splits = (q_size, kv_size, kv_size)
    x, y = random_numbers(tokens, geometry.hidden, device=device), random_numbers(tokens, sum(splits), device=device)
    matrices = [
        (random_numbers(RANK, geometry.hidden, device=device), whole_rows(random_numbers(width, RANK, device=device)))
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
    yield Bench(
        name=f"LoRA of q, k and v, {tokens} tokens of {adapters} adapters",
        run=run,
        num_bytes=num_weights * x.element_size() + x.nbytes + 2 * y.nbytes,
    )


def _token_choices(device: torch.device, *, rows: int, vocab: int) -> Iterator[Bench]:
    logits = torch.randn(rows, vocab, device=device)
    seeds = torch.arange(2 * rows, device=device).view(rows, 2)
    for name, top_k, top_p in (("", 0, 1.0), (", top-p 0.9", 0, 0.9), (", top-k 40 and top-p 0.9", 40, 0.9)):
        knobs = torch.tensor([[1.0, -torch.inf, top_k, top_p]], dtype=torch.float64, device=device).repeat(rows, 1)
        yield Bench(
            name=f"token choice, {rows} rows of {vocab}{name}",
            run=lambda knobs=knobs: choose_tokens(logits, knobs, seeds),  # type: ignore[misc]
            num_bytes=logits.nbytes,
        )


def _cache(geometry: Geometry, tokens: int, device: torch.device) -> torch.Tensor:
    blocks = -(-tokens // BLOCK_TOKENS)
    return random_numbers(2, blocks, BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim, device=device)


def random_numbers(*shape: int, device: torch.device) -> torch.Tensor:
    """Draw numbers near 1, in bfloat16 where there is a GPU."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.randn(shape, dtype=dtype, device=device)
