"""Benchmarks of every kernel but attention in the shapes of one layer: bytes and operations per second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial

import torch
from torch.nn import functional

from engine.gpu.streamed_linear import StreamedLinear
from kernels.add_rms_norm.launch import add_rms_norm
from kernels.architecture import fp8_dtype, has_fp8_products
from kernels.embedding.launch import put_drawn, take_rows
from kernels.gated_activation.launch import activate_and_multiply
from kernels.gated_activation.reference import Activation
from kernels.logit_edits.launch import edit_logits
from kernels.lora_expand.launch import lora_expand
from kernels.lora_gather.launch import lora_gather
from kernels.lora_logits.launch import lora_logits
from kernels.lora_shrink.launch import Tiles, cut, lora_shrink, whole_rows
from kernels.rope_kv_write.launch import rope_kv_write
from kernels.row_quantization.launch import empty_rounded, quantize_rows
from kernels.streamed_linear.launch import MAX_ROWS, counters, from_int4, row_linear, streamed_linear
from kernels.streamed_linear.layout import BYTES_PER_WEIGHT
from kernels.streamed_linear.reference import to_int4
from kernels.token_choice import launch as token_choice
from kernels.token_logprobs.launch import tell
from loadtest.gpu.attention import random_cache
from loadtest.gpu.bench import Bench, random_numbers
from loadtest.gpu.parts import Attempt
from loadtest.gpu.sizes import Geometry

RANK, RANKS = 16, (8, 16, 64, 128)
SHORT = torch.bfloat16 if torch.cuda.is_available() else torch.float16
"""Activation dtype for 4-bit weights; Triton's interpreter does not support bfloat16."""
VOCAB = 128_256


def benches(
    geometry: Geometry, device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext
) -> Iterator[Bench]:
    """Yield the kernels of one layer on fresh inputs; `scale` divides batch and context for a trial without a GPU."""
    held_types = [held for held in (torch.int8, fp8_dtype()) if held is not None]
    some = max(1, 64 // scale)
    families = [
        _elementwise(geometry, device, tokens=8192 // scale),
        _embedding(geometry, device, tokens=8192 // scale, vocab=VOCAB // scale),
        *(_quantization(geometry, device, tokens=some, held=held) for held in held_types),
        *(_products(geometry, device, rows=rows) for rows in sorted({max(1, rows // scale) for rows in (1, 16, 64)})),
        *(_fp8_products(geometry, device, rows=max(1, rows // scale)) for rows in (1, 16, 64, 128)),
        *(_library_products(geometry, device, rows=max(1, rows // scale)) for rows in (64, 8192)),
        *(_lora(geometry, device, tokens=max(2, some), adapters=max(1, adapters // scale)) for adapters in (1, 8, 64)),
        *(
            _lora(geometry, device, tokens=max(2, some), adapters=max(1, 8 // scale), rank=rank)
            for rank in RANKS
            if rank != RANK
        ),
        *(
            _lora(geometry, device, tokens=max(2, some), adapters=max(1, 8 // scale), projection=projection)
            for projection in ("o", "gate and up", "down")
        ),
        _lora(geometry, device, tokens=max(2, 2048 // scale), adapters=max(1, 8 // scale)),
        _lora_of_whole_model(geometry, device, rows=some, vocab=VOCAB // scale),
        _token_choices(device, rows=1, vocab=VOCAB // scale),
        _token_choices(device, rows=some, vocab=VOCAB // scale),
        _logit_edits(device, rows=some, vocab=VOCAB // scale),
        _logprobs(device, rows=some, vocab=VOCAB // scale),
    ]
    for family in families:
        with attempt("inputs"):
            yield from family


def _elementwise(geometry: Geometry, device: torch.device, *, tokens: int) -> Iterator[Bench]:
    x, delta = (random_numbers(tokens, geometry.hidden, device=device) for _ in range(2))
    weight = random_numbers(geometry.hidden, device=device)
    yield Bench(
        name=f"add and norm, {tokens} tokens", run=lambda: add_rms_norm(x, delta, weight, 1e-5), num_bytes=4 * x.nbytes
    )
    gate_up = random_numbers(tokens, 2 * geometry.inner, device=device)
    activations: tuple[Activation, ...] = ("silu", "gelu")
    for activation in activations:
        yield Bench(
            name=f"gated activation, {tokens} tokens, {activation}",
            run=partial(activate_and_multiply, gate_up, activation),
            num_bytes=1.5 * gate_up.nbytes,
        )
    heads = geometry.heads + 2 * geometry.kv_heads
    qkv = random_numbers(tokens, heads * geometry.head_dim, device=device)
    cos_sin = random_numbers(tokens, 2, geometry.head_dim, device=device)
    cache = random_cache(geometry, tokens, device)
    slots = torch.randperm(tokens, device=device)
    yield Bench(
        name=f"rotate and write, {tokens} tokens",
        run=lambda: rope_kv_write(
            qkv=qkv, cos_sin=cos_sin, norms=None, eps=1e-6, k_cache=cache[0], v_cache=cache[1], slots=slots
        ),
        num_bytes=2 * qkv.nbytes + cos_sin.nbytes,
    )


def _embedding(geometry: Geometry, device: torch.device, *, tokens: int, vocab: int) -> Iterator[Bench]:
    """Yield the first kernels of a step: the embedding lookup, and inserting tokens sampled by the previous step."""
    table, ids = (
        random_numbers(vocab, geometry.hidden, device=device),
        torch.randint(0, vocab, (tokens,), device=device),
    )
    rows, drawn = torch.zeros(tokens, 4, dtype=torch.int64, device=device), torch.zeros_like(ids)
    yield Bench(
        name=f"rows of the embedding, {tokens} tokens",
        run=lambda: take_rows(table, ids),
        num_bytes=2 * tokens * geometry.hidden * table.element_size() + ids.nbytes,
    )
    yield Bench(
        name=f"drawn tokens put in place, {tokens} tokens",
        run=lambda: put_drawn(ids, rows, drawn, -1),
        num_bytes=2 * ids.nbytes + rows.nbytes,
    )


def _quantization(geometry: Geometry, device: torch.device, *, tokens: int, held: torch.dtype) -> Iterator[Bench]:
    x = random_numbers(tokens, geometry.inner, device=device)
    yield Bench(
        name=f"row quantization, {tokens} tokens to {held}",
        run=lambda: quantize_rows(x, held),
        num_bytes=x.nbytes + x.numel(),
    )
    heads, head_dim = geometry.heads + 2 * geometry.kv_heads, geometry.head_dim
    qkv, cos_sin = (random_numbers(tokens, *shape, device=device) for shape in ((heads * head_dim,), (2, head_dim)))
    cache = random_cache(geometry, tokens, device)
    spans = torch.zeros(cache.shape[:-1], dtype=torch.float32, device=device)
    cache = cache.to(held)
    norm, slots = random_numbers(head_dim, device=device), torch.randperm(tokens, device=device)
    num_held = 2 * tokens * geometry.kv_heads * head_dim
    yield Bench(
        name=f"norms and rotation and rounding, {tokens} tokens to a cache of {held}",
        run=lambda: rope_kv_write(
            qkv=qkv,
            cos_sin=cos_sin,
            norms=(norm, norm),
            eps=1e-6,
            k_cache=cache[0],
            v_cache=cache[1],
            slots=slots,
            spans=(spans[0], spans[1]),
        ),
        num_bytes=2 * qkv.nbytes + cos_sin.nbytes - num_held * (qkv.element_size() - 1),
    )
    delta, gate_up, room = x.clone(), x.repeat(1, 2), empty_rounded(x, held)
    yield Bench(
        name=f"norm and rounding, {tokens} tokens to {held}",
        run=lambda: add_rms_norm(x, delta, x[0], 1e-5, room),
        num_bytes=4 * x.nbytes + x.numel(),
    )
    yield Bench(
        name=f"gated activation and rounding, {tokens} tokens to {held}",
        run=lambda: activate_and_multiply(gate_up, "silu", room),
        num_bytes=3 * x.nbytes + x.numel(),
    )


def _products(geometry: Geometry, device: torch.device, *, rows: int) -> Iterator[Bench]:
    """Yield each matrix product of a layer by this application's kernels and by the library, then with int4 weights."""
    hidden, inner = geometry.hidden, geometry.inner
    for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        x, weight = random_numbers(rows, depth, device=device), random_numbers(width, depth, device=device)
        arrived = counters(width, rows, device)
        num_flop, others = 2.0 * rows * width * depth, x.nbytes + rows * width * x.element_size()
        where = f", {rows} rows by {width} x {depth}"
        ways: dict[str, Callable[[], torch.Tensor]] = {
            "streamed product": partial(streamed_linear, x, weight, None, arrived),
            "the library's product": partial(functional.linear, x, weight),
        }
        if rows <= MAX_ROWS:
            ways["row product"] = partial(row_linear, x, weight, None)
        for name, run in ways.items():
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


def _fp8_products(geometry: Geometry, device: torch.device, *, rows: int) -> Iterator[Bench]:
    """Yield each fp8 matrix product of a layer in every way that the engine may use for this number of rows.

    Quantization of the inputs, if any, is included in the time but not in the floor, which counts only the product.
    """
    if not has_fp8_products():
        return
    hidden, inner = geometry.hidden, geometry.inner
    for width, depth in ((hidden, hidden), (2 * inner, hidden), (hidden, inner)):
        x, weight = (random_numbers(count, depth, device=device).to(torch.bfloat16) for count in (rows, width))
        linear = StreamedLinear(weight, None, quantization="fp8")
        for way in linear.open_ways(rows):
            yield Bench(
                name=f"fp8 product by {way.value}, {rows} rows by {width} x {depth}",
                run=partial(linear.multiply, x, way),
                num_bytes=width * depth + x.nbytes + rows * width * x.element_size(),
                num_fp8_flop=2.0 * rows * width * depth,
            )


def _library_products(geometry: Geometry, device: torch.device, *, rows: int) -> Iterator[Bench]:
    """Yield the products that dominate prefill: the library's, of the widest shape, with 16-bit and fp8 weights.

    The fp8 products accumulate in float32, as in the engine, or in fewer bits, which is faster.
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
            num_fp8_flop=num_flop,
        )


def _lora(
    geometry: Geometry,
    device: torch.device,
    *,
    tokens: int,
    adapters: int,
    rank: int = RANK,
    projection: str = "q, k and v",
) -> Iterator[Bench]:
    q_size, kv_size = geometry.heads * geometry.head_dim, geometry.kv_heads * geometry.head_dim
    depth, splits = {
        "q, k and v": (geometry.hidden, (q_size, kv_size, kv_size)),
        "o": (q_size, (geometry.hidden,)),
        "gate and up": (geometry.hidden, (geometry.inner, geometry.inner)),
        "down": (geometry.inner, (geometry.hidden,)),
    }[projection]
    x, y = random_numbers(tokens, depth, device=device), random_numbers(tokens, sum(splits), device=device)
    matrices = [
        (random_numbers(rank, depth, device=device), whole_rows(random_numbers(width, rank, device=device)))
        for _ in range(adapters)
        for width in splits
    ]
    tables = torch.tensor([[a.data_ptr(), b.data_ptr(), rank, 0] for a, b in matrices], device=device)
    per_adapter = tokens // adapters
    segments = [(i * per_adapter, (i + 1) * per_adapter, tables[len(splits) * i].data_ptr()) for i in range(adapters)]
    spans = [[*span, table] for start, end, table in segments for span in cut(start, end)]
    tiles = _tiles(spans, device)

    def run(kept: object = (matrices, tables)) -> None:
        shrunk = lora_shrink(x, tiles, entry=0, num_modules=len(splits), max_rank=rank)
        lora_expand(y, shrunk, tiles, entry=0, splits=splits)

    num_weights = sum(a.numel() + b.numel() for a, b in matrices)
    yield Bench(
        name=f"LoRA of {projection}, {tokens} tokens of {adapters} adapters of rank {rank}",
        run=run,
        num_bytes=num_weights * x.element_size() + x.nbytes + 2 * y.nbytes,
    )


def _tiles(spans: Sequence[Sequence[int]], device: torch.device) -> Tiles:
    numbers, count = torch.tensor(spans, device=device), torch.tensor([len(spans)], device=device)
    return Tiles(numbers=numbers, count=count, most=len(spans))


def _lora_of_whole_model(geometry: Geometry, device: torch.device, *, rows: int, vocab: int) -> Iterator[Bench]:
    """Yield the cost of an adapter of the embedding, and of one with its own output matrix, for `rows` rows."""
    a, b = (whole_rows(random_numbers(count, RANK, device=device)) for count in (vocab, geometry.hidden))
    own, x = (random_numbers(count, geometry.hidden, device=device) for count in (vocab, rows))
    table = torch.zeros(3, 4, dtype=torch.int64)
    table[1, :3] = torch.tensor([a.data_ptr(), b.data_ptr(), RANK])
    table[2, 1:3] = torch.tensor([own.data_ptr(), geometry.hidden])
    table = table.to(device)
    spans = [[*span, table.data_ptr()] for span in cut(0, rows)]
    tiles = _tiles(spans, device)
    ids, logits = torch.randint(0, vocab, (rows,), device=device), torch.zeros(rows, vocab, device=device)

    def gather(kept: object = (a, b, table)) -> None:
        lora_gather(ids, x, tiles, own=0, entry=1)

    def write(kept: object = (own, table)) -> None:
        lora_logits(x, logits, tiles, entry=2)

    num_bytes = 2 * x.nbytes + b.nbytes + rows * a.shape[1] * a.element_size()
    yield Bench(name=f"LoRA of the embedding, {rows} tokens", run=gather, num_bytes=num_bytes)
    yield Bench(
        name=f"logits by an adapter's own matrix, {rows} rows of {vocab}",
        run=write,
        num_bytes=own.nbytes + x.nbytes + logits.nbytes,
        num_flop=2.0 * own.numel() * rows,
    )


def _token_choices(device: torch.device, *, rows: int, vocab: int) -> Iterator[Bench]:
    # A model's likeliest tokens fall off about like this; of a nearly uniform distribution, top-p keeps most tokens.
    ranks = torch.arange(1, vocab + 1, dtype=torch.float32)
    peaked = torch.stack([(-1.5 * ranks.log())[torch.randperm(vocab)] for _ in range(rows)]).to(device)
    even = torch.randn(rows, vocab, device=device)
    seeds = torch.arange(2 * rows, device=device).view(rows, 2)
    arrived = token_choice.counters(rows, device)
    for name, logits, top_k, top_p in (
        ("", peaked, 0, 1.0),
        (", top-p 0.9", peaked, 0, 0.9),
        (", top-k 20 and top-p 0.95", peaked, 20, 0.95),
        (", top-p 0.9, nearly even", even, 0, 0.9),
    ):
        knobs = torch.tensor([[1.0, -torch.inf, top_k, top_p]], dtype=torch.float64, device=device).repeat(rows, 1)
        yield Bench(
            name=f"token choice, {rows} rows of {vocab}{name}",
            run=lambda logits=logits, knobs=knobs: token_choice.choose_tokens(logits, knobs, seeds, arrived),  # type: ignore[misc]
            num_bytes=logits.nbytes,
        )


def _logit_edits(device: torch.device, *, rows: int, vocab: int) -> Iterator[Bench]:
    logits = torch.randn(rows, vocab, device=device)
    words = torch.full((rows, 2 * -(-vocab // 64)), -1, dtype=torch.int32, device=device)
    in_prompt, counts = (torch.zeros(rows, vocab, dtype=dtype, device=device) for dtype in (torch.bool, torch.int32))
    knobs = torch.tensor([[1.1, 0.5, 0.5]], dtype=torch.float64, device=device).repeat(rows, 1).view(torch.int64)
    each, none = torch.arange(rows, device=device), torch.full((rows,), -1, device=device)
    for name, tables, masks, read in (
        ("masks", none, each, words.nbytes),
        ("penalties", each, none, in_prompt.nbytes + counts.nbytes),
        ("masks and penalties", each, each, words.nbytes + in_prompt.nbytes + counts.nbytes),
    ):
        edits = torch.cat([torch.stack((each, tables, masks), dim=1), knobs], dim=1)
        yield Bench(
            name=f"{name} of logits, {rows} rows of {vocab}",
            run=partial(edit_logits, logits, edits, words, in_prompt, counts),
            num_bytes=2 * logits.nbytes + read,
        )


def _logprobs(device: torch.device, *, rows: int, vocab: int) -> Iterator[Bench]:
    logits, token_ids = torch.randn(rows, vocab, device=device), torch.arange(rows, device=device)
    for num_top in (0, 5, 20):
        yield Bench(
            name=f"log-probabilities, {rows} rows of {vocab}, top {num_top}",
            run=partial(tell, logits, token_ids, num_top),
            num_bytes=logits.nbytes,
        )
