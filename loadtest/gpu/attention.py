"""Benchmarks of attention over the paged KV cache in the shapes of one layer, and of other libraries' attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, TypedDict

import torch
from torch.nn import functional

from kernels.architecture import fp8_dtype
from kernels.paged_attention.launch import Share, counters, paged_attention
from kernels.rope_attention.launch import USUAL, AttentionCut, rope_attention
from kernels.row_quantization.launch import quantize_rows
from loadtest.gpu.bench import Bench, random_numbers
from loadtest.gpu.parts import Attempt
from loadtest.gpu.sizes import BLOCK_TOKENS, LLAMA, Geometry


class Form(TypedDict, total=False):
    """What distinguishes attention of a model: the dtype of an 8-bit cache, its window, its soft cap."""

    held: torch.dtype
    window: int
    softcap: float


ROWS, CONTEXT = 64, 4096
"""The decode shape that has a target."""
FORMS: tuple[tuple[Geometry, Form], ...] = (
    (Geometry(name="gpt-oss-20b", hidden=2880, inner=2880, heads=64, kv_heads=8, head_dim=64), {"window": 128}),
    (Geometry(name="phi-2", hidden=2560, inner=10240, heads=32, kv_heads=32, head_dim=80), {}),
    (Geometry(name="Phi-3-mini", hidden=3072, inner=8192, heads=32, kv_heads=32, head_dim=96), {"window": 2047}),
    (
        Geometry(name="gemma-2-9b", hidden=3584, inner=14336, heads=16, kv_heads=8, head_dim=256),
        {"window": 4096, "softcap": 50.0},
    ),
    (LLAMA, {"held": torch.int8}),
    (LLAMA, {"held": torch.float8_e4m3fn}),
)
"""Attention of other models, and of prompts over 8-bit caches."""
WORKSPACE_BYTES = 128 << 20
"""flashinfer's workspace for partial results of split rows."""


def benches(
    geometry: Geometry, device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext
) -> Iterator[Bench]:
    """Yield this application's kernels on fresh inputs; `scale` divides batch and context for a trial without a GPU."""
    decoding = partial(_decode_attention, geometry, device)
    few, some, many = max(1, 32 // scale), max(1, ROWS // scale), 8192 // scale
    families = [
        decoding(rows=some, context=CONTEXT // scale),
        decoding(rows=1, context=many),
        decoding(rows=1, context=1024 // scale),
        *(_rope_attention(geometry, device, rows=1, context=context) for context in (many, 1024 // scale)),
        decoding(rows=few, context=many),
        *(decoding(rows=few, context=many, held=held) for held in (torch.int8, fp8_dtype()) if held is not None),
        decoding(rows=max(2, some), context=512 // scale, longest=32_768 // scale),
        _prefill_attention(geometry, device, tokens=many),
    ]
    for family in families:
        with attempt("inputs"):
            yield from family


def forms(device: torch.device, *, scale: int = 1, attempt: Attempt = nullcontext) -> Iterator[Bench]:
    """Yield decodes and prompts of `FORMS`; `scale` as in `benches`."""
    rows, tokens = max(1, 32 // scale), 8192 // scale
    for geometry, form in FORMS:
        if form.get("held", torch.int8) not in (torch.int8, fp8_dtype()):
            continue
        with attempt("inputs"):
            what = ", ".join(
                [geometry.name, f"heads of {geometry.head_dim}", *(f"{name} {value}" for name, value in form.items())]
            )
            attend, num_bytes = attention_inputs(geometry, device, rows=rows, context=tokens // 2, **form)
            seen = min(tokens // 2, form.get("window") or tokens)
            yield Bench(
                name=f"decode attention of {what}, {rows} rows of {tokens // 2}",
                run=partial(attend, None),
                num_bytes=num_bytes * seen / (tokens // 2),
                num_flop=4.0 * rows * seen * geometry.heads * geometry.head_dim,
            )
            yield _prompt(geometry, device, tokens, f"prefill attention of {what}, {tokens} tokens", form)


def peers(geometry: Geometry, device: torch.device, *, scale: int = 1) -> list[tuple[str, Callable[[], Bench]]]:
    """Return (name, factory) of other libraries' kernels for the target's shape; each factory may fail.

    Compiled ones come after the others, and flashinfer last: without prebuilt kernels it compiles for a long time.
    """
    rows, context = max(1, ROWS // scale), CONTEXT // scale
    makers = {"torch's": _torch_attention, "torch's compiled flex": _flex_attention}
    if find_spec("flashinfer") is not None:
        makers["flashinfer's"] = _flashinfer_attention

    def made(name: str, make: Callable[[Geometry, torch.device, int, int], Callable[[], object]]) -> Bench:
        run = make(geometry, device, rows, context)
        num_read = rows * context * 2 * geometry.kv_heads * geometry.head_dim
        num_asked = rows * geometry.heads * geometry.head_dim
        element_bytes = random_numbers(1, device=device).itemsize
        return Bench(
            name=name,
            run=run,
            num_bytes=(num_read + 2 * num_asked) * element_bytes,
            num_flop=4.0 * num_asked * context,
        )

    names = {f"{whose} decode attention, {rows} rows of {context}": make for whose, make in makers.items()}
    return [(name, partial(made, name, make)) for name, make in names.items()]


def attention_inputs(
    geometry: Geometry,
    device: torch.device,
    *,
    rows: int,
    context: int,
    held: torch.dtype | None = None,
    longest: int = 0,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Callable[[Share | None], torch.Tensor], float]:
    """Return a function from cut to decode attention, for rows of one token over `context` keys each, and its bytes.

    The bytes are those that it must move without a window. If `longest` is given, the first row has so many keys.
    """
    per_row = -(-context // BLOCK_TOKENS)
    num_alike, num_more = rows * per_row, max(0, -(-longest // BLOCK_TOKENS) - per_row)
    cache, spans = _held(random_cache(geometry, (num_alike + num_more) * BLOCK_TOKENS, device), held)
    # Blocks that no other row has: read a second time, they would come from the GPU's cache.
    blocks = torch.randperm(num_alike + num_more, device=device)
    tables = torch.cat((blocks[:num_alike].view(rows, per_row), blocks[num_alike:].expand(rows, -1)), dim=1)
    at = torch.arange(rows, device=device)
    table = torch.stack((at, torch.full_like(at, context - 1), torch.ones_like(at), at), dim=1)
    if longest:
        table[0, 1] = longest - 1
    q = random_numbers(rows, geometry.heads, geometry.head_dim, device=device)
    num_bytes = cache.nbytes + 2 * q.nbytes
    options: dict[str, Any] = {
        "rows": table,
        "num_decodes": rows,
        "tables": tables,
        "arrived": counters(device),
        "spans": spans,
        "window": window,
        "softcap": softcap,
    }
    return lambda cut: paged_attention(q=q, k_cache=cache[0], v_cache=cache[1], cut=cut, **options), num_bytes + (
        0 if spans is None else 2 * spans[0].nbytes
    )


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


def rope_attention_inputs(
    geometry: Geometry, device: torch.device, *, rows: int, context: int
) -> tuple[Callable[[AttentionCut], torch.Tensor], float]:
    """Return a function from cut to fused RoPE, cache write and attention over `context` keys, and its bytes."""
    per_row = -(-context // BLOCK_TOKENS)
    cache = random_cache(geometry, rows * per_row * BLOCK_TOKENS, device)
    tables = torch.randperm(rows * per_row, device=device).view(rows, per_row)
    at = torch.arange(rows, device=device)
    last = tables[:, (context - 1) // BLOCK_TOKENS] * BLOCK_TOKENS + (context - 1) % BLOCK_TOKENS
    qkv = random_numbers(rows, (geometry.heads + 2 * geometry.kv_heads) * geometry.head_dim, device=device)
    options: dict[str, Any] = {
        "qkv": qkv,
        "cos_sin": random_numbers(rows, 2, geometry.head_dim, device=device),
        "norms": None,
        "eps": 1e-6,
        "slots": last,
        "rows": torch.stack((at, torch.full_like(at, context - 1), torch.ones_like(at), at), dim=1),
        "tables": tables,
        "arrived": counters(device),
    }
    return lambda cut: rope_attention(k_cache=cache[0], v_cache=cache[1], cut=cut, **options), cache.nbytes + qkv.nbytes


def _rope_attention(geometry: Geometry, device: torch.device, *, rows: int, context: int) -> Iterator[Bench]:
    attend, num_bytes = rope_attention_inputs(geometry, device, rows=rows, context=context)
    yield Bench(
        name=f"rotate, write and attend, {rows} rows of {context}",
        run=lambda: attend(USUAL),
        num_bytes=num_bytes,
        num_flop=4.0 * rows * context * geometry.heads * geometry.head_dim,
    )


def _held(
    cache: torch.Tensor, held: torch.dtype | None
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Return the keys and values in an 8-bit dtype, and their spans; unchanged for None."""
    if held is None:
        return cache, None
    flat, found = quantize_rows(cache.view(-1, cache.shape[-1]), held)
    spans = found.view(cache.shape[:-1])
    return flat.view(cache.shape), (spans[0], spans[1])


def _prompt(geometry: Geometry, device: torch.device, tokens: int, name: str, form: Form) -> Bench:
    """Return attention of one prompt, which reads every key of it, or of its windows, at least once."""
    cache, spans = _held(random_cache(geometry, tokens, device), form.get("held"))
    q = random_numbers(tokens, geometry.heads, geometry.head_dim, device=device)
    options: dict[str, Any] = {
        "rows": torch.tensor([[0, 0, tokens, 0]], device=device),
        "num_decodes": 0,
        "tables": torch.randperm(-(-tokens // BLOCK_TOKENS), device=device).unsqueeze(0),
        "arrived": counters(device),
        "spans": spans,
        "window": form.get("window", 0),
        "softcap": form.get("softcap", 0.0),
    }
    seen = min(tokens, form.get("window") or tokens)
    return Bench(
        name=name,
        run=lambda: paged_attention(q=q, k_cache=cache[0], v_cache=cache[1], **options),
        num_bytes=2 * q.nbytes + cache.nbytes + (0 if spans is None else 2 * spans[0].nbytes),
        # Of a token in the window, as many keys as there are before it; of any other, the whole window.
        num_flop=4.0 * (tokens * seen - seen**2 / 2) * geometry.heads * geometry.head_dim,
    )


def _prefill_attention(geometry: Geometry, device: torch.device, *, tokens: int) -> Iterator[Bench]:
    ours = _prompt(geometry, device, tokens, f"prefill attention, {tokens} tokens", {})
    yield ours
    q = random_numbers(tokens, geometry.heads, geometry.head_dim, device=device)
    k, v = random_numbers(2, 1, geometry.kv_heads, tokens, geometry.head_dim, device=device)
    dense = q.transpose(0, 1).unsqueeze(0)
    yield Bench(
        name=f"torch's prefill attention, {tokens} tokens",
        run=lambda: functional.scaled_dot_product_attention(dense, k, v, is_causal=True, enable_gqa=True),
        num_bytes=ours.num_bytes,
        num_flop=ours.num_flop,
    )


def _torch_attention(geometry: Geometry, device: torch.device, rows: int, context: int) -> Callable[[], object]:
    """Return torch's attention, over contiguous keys and values."""
    q, k, v = _dense_inputs(geometry, device, rows, context)
    return lambda: functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def _flex_attention(geometry: Geometry, device: torch.device, rows: int, context: int) -> Callable[[], object]:
    """Return torch's flex attention, compiled."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = _dense_inputs(geometry, device, rows, context)
    attend = torch.compile(flex_attention, dynamic=False)
    return lambda: attend(q, k, v, enable_gqa=True)


def _flashinfer_attention(geometry: Geometry, device: torch.device, rows: int, context: int) -> Callable[[], object]:
    """Return flashinfer's attention over a cache with the same paging; its planning on the host is not timed."""
    import flashinfer

    cache = random_cache(geometry, rows * context, device)
    q = random_numbers(rows, geometry.heads, geometry.head_dim, device=device)
    per_row = -(-context // BLOCK_TOKENS)
    workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    wrapper.plan(
        torch.arange(0, rows * per_row + 1, per_row, dtype=torch.int32, device=device),
        torch.randperm(rows * per_row, device=device).int(),
        torch.full((rows,), context - (per_row - 1) * BLOCK_TOKENS, dtype=torch.int32, device=device),
        geometry.heads,
        geometry.kv_heads,
        geometry.head_dim,
        BLOCK_TOKENS,
        q_data_type=q.dtype,
        kv_data_type=q.dtype,
    )
    return lambda: wrapper.run(q, (cache[0], cache[1]))


def _dense_inputs(
    geometry: Geometry, device: torch.device, rows: int, context: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q = random_numbers(rows, geometry.heads, 1, geometry.head_dim, device=device)
    k, v = random_numbers(2, rows, geometry.kv_heads, context, geometry.head_dim, device=device)
    return q, k, v


def random_cache(geometry: Geometry, tokens: int, device: torch.device) -> torch.Tensor:
    """Return random keys and values of one layer, [2, blocks, block tokens, KV heads, head dim]."""
    blocks = -(-tokens // BLOCK_TOKENS)
    return random_numbers(2, blocks, BLOCK_TOKENS, geometry.kv_heads, geometry.head_dim, device=device)
