"""A cache of one byte a number: written as the reference writes it, and read near to what was meant."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from kernels import architecture
from kernels.architecture import fp8_dtype
from kernels.paged_attention import launch as attention
from kernels.paged_attention.decode_kernel import _missing_factor, _numbers_of
from kernels.paged_attention.reference import paged_attention
from kernels.rope_kv_write import launch as rope
from kernels.rope_kv_write.reference import rope_kv_write
from kernels.row_quantization.reference import quantize_rows
from tests.kernels.gpu.conftest import DEVICE, assert_near, randn

TOKENS, BLOCKS, BLOCK_TOKENS, HEADS, KV_HEADS = 21, 4, 16, 6, 2
FP8 = fp8_dtype() or torch.float8_e4m3fn
TOLERANCE = {torch.int8: 0.02, FP8: 0.08}
"""Of the outputs together (root mean square), against a cache that holds numbers as they are."""
KINDS = [
    (torch.int8, torch.float32),
    (FP8, torch.float32),
    (torch.int8, torch.bfloat16),
    (FP8, torch.bfloat16),
    (torch.int8, torch.float16),
    (FP8, torch.float16),
]


class Cache:
    """Keys, values and what they span; what nobody has written is NaN where it can be.

    Tokens are further apart than their heads are wide, as in a cache that has wider layers too.
    """

    def __init__(self, dtype: torch.dtype, dim: int, *, is_quantized: bool) -> None:
        shape, width = (2, BLOCKS, BLOCK_TOKENS), KV_HEADS * dim
        numbers = torch.full((*shape, width + dim), 99.0, device=DEVICE).to(dtype)
        self.parts = numbers[..., :width].unflatten(-1, (KV_HEADS, dim))
        self.spans: torch.Tensor | None = None
        if is_quantized:
            self.spans = torch.full((*shape, KV_HEADS + 1), torch.nan, device=DEVICE)[..., :KV_HEADS]

    def options(self) -> dict[str, object]:
        spans = None if self.spans is None else (self.spans[0], self.spans[1])
        return {"k_cache": self.parts[0], "v_cache": self.parts[1], "spans": spans}


@pytest.mark.parametrize("seen", [{}, {"window": 20, "softcap": 2.0}])
@pytest.mark.parametrize(("held", "dtype"), KINDS)
def test_written_and_read(
    monkeypatch: pytest.MonkeyPatch, held: torch.dtype, dtype: torch.dtype, seen: dict[str, float]
) -> None:
    monkeypatch.setattr(architecture, "num_multiprocessors", lambda: 4)
    check(held, dtype, seen, dim=48)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256, 512])
@pytest.mark.parametrize(("held", "dtype"), [KINDS[0], *KINDS[2:]])
def test_every_head_size(monkeypatch: pytest.MonkeyPatch, held: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    monkeypatch.setattr(architecture, "num_multiprocessors", lambda: 4)
    check(held, dtype, {"window": 9}, dim=dim)


def check(held: torch.dtype, dtype: torch.dtype, seen: dict[str, float], *, dim: int) -> None:
    """Write a row's keys and values, and read them as its last token and as a chunk does."""
    qkv = randn(TOKENS, (HEADS + 2 * KV_HEADS) * dim, dtype=dtype)
    angles = torch.randn(TOKENS, dim // 2, device=DEVICE).repeat(1, 2)
    cos_sin = torch.stack((angles.cos(), angles.sin()), dim=1).to(dtype)
    slots = torch.randperm(BLOCKS, device=DEVICE)[:2].repeat_interleave(BLOCK_TOKENS) * BLOCK_TOKENS
    table = (slots[::BLOCK_TOKENS] // BLOCK_TOKENS).unsqueeze(0)
    slots = (slots + torch.arange(len(slots), device=DEVICE) % BLOCK_TOKENS)[:TOKENS]
    inputs = {"qkv": qkv, "cos_sin": cos_sin, "norms": None, "eps": 0.0, "slots": slots}

    found, plain = Cache(held, dim, is_quantized=True), Cache(dtype, dim, is_quantized=False)
    q = rope.rope_kv_write(**inputs, **found.options())
    rope_kv_write(**inputs, **plain.options())
    # In the short types the definition rounds products, too, and a key that is off by a bit is all held otherwise.
    exact, expected = Cache(torch.float64, dim, is_quantized=False), Cache(held, dim, is_quantized=True)
    wide = inputs | {"qkv": qkv.double(), "cos_sin": cos_sin.double()}
    assert_near(q, rope_kv_write(**wide, **exact.options()))
    at = slice(None), slots // BLOCK_TOKENS, slots % BLOCK_TOKENS
    assert found.spans is not None
    assert expected.spans is not None
    expected.parts[at], expected.spans[at] = quantize_rows(exact.parts[at].to(dtype), held)
    torch.testing.assert_close(found.spans, expected.spans, rtol=torch.finfo(dtype).eps, atol=0, equal_nan=True)
    # The rotation may round otherwise by one bit, and then what is held by one step.
    same = found.parts.float() == expected.parts.float()
    assert same.float().mean() > 0.99

    last = TOKENS - 1
    ends = {"block_tables": table.tolist(), "starts": [last], "ends": [TOKENS], **seen}
    rows = torch.tensor([[0, last, 1, 0]], device=DEVICE)
    arrived = attention.counters(DEVICE)
    read = attention.paged_attention(
        q=q[last:], **found.options(), rows=rows, num_decodes=1, tables=table, arrived=arrived, **seen
    )
    assert_near(read, paged_attention(q=q[last:].double(), **found.options(), **ends))
    meant = paged_attention(q=q[last:].double(), **plain.options(), **ends)
    assert (read.double() - meant).norm() <= TOLERANCE[held] * meant.norm()
    chunk = attention.paged_attention(
        q=q,
        **found.options(),
        rows=torch.tensor([[0, 0, TOKENS, 0]], device=DEVICE),
        num_decodes=0,
        tables=table,
        arrived=arrived,
        **seen,
    )
    assert_near(chunk[last:], read.double())


@pytest.mark.parametrize("held", [torch.int8, FP8])
def test_a_value_that_is_not_finite_is_seen_by_those_who_read_it(held: torch.dtype) -> None:
    dim, cache = 16, Cache(held, 16, is_quantized=True)
    qkv = randn(2, (HEADS + 2 * KV_HEADS) * dim, dtype=torch.float32)
    qkv[1, HEADS * dim + 3] = torch.nan
    cos_sin = torch.ones(2, 2, dim, device=DEVICE)
    slots = torch.tensor([0, 1], device=DEVICE)
    q = rope.rope_kv_write(qkv=qkv, cos_sin=cos_sin, norms=None, eps=0.0, slots=slots, **cache.options())
    table = torch.zeros(1, 1, dtype=torch.int64, device=DEVICE)
    rows = torch.tensor([[0, 0, 2, 0]], device=DEVICE)
    arrived = attention.counters(DEVICE)
    out = attention.paged_attention(q=q, **cache.options(), rows=rows, num_decodes=0, tables=table, arrived=arrived)
    assert out[0].isfinite().all()
    assert out[1, :3].isnan().all()
    assert out[1, 3:].isfinite().all()


@triton.jit
def numbers_kernel(words, out, element: tl.constexpr, COUNT: tl.constexpr):
    """Write the numbers of words [COUNT, 1], float32 [COUNT, 4]."""
    place = tl.arange(0, COUNT)[:, None]
    numbers = _numbers_of(tl.load(words + place), element == tl.int8, tl.float16).to(tl.float32)
    tl.store(out + place * 4 + tl.arange(0, 4)[None, :], numbers * _missing_factor(element))


@pytest.mark.parametrize(
    ("held", "element"),
    [(torch.int8, tl.int8), (torch.float8_e4m3fn, tl.float8e4nv), (torch.float8_e4m3fnuz, tl.float8e4b8)],
)
def test_each_number_of_a_byte_is_exact_in_words(held: torch.dtype, element: tl.dtype) -> None:
    """Also in the FP8 of AMD's, whose exponents have another bias."""
    numbers = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(held)
    found = torch.empty(64, 4, device=DEVICE)
    numbers_kernel[(1,)](numbers.view(torch.int32), found, element, 64)
    expected = numbers.float()
    expected = torch.where(expected.isnan(), 0.0, expected)
    found = found[:, [0, 2, 1, 3]].flatten()
    assert torch.equal(torch.where(numbers.float().isnan(), 0.0, found), expected)
