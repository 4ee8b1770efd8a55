"""Our CPU kernels called one by one compute what torch's operators do."""

from __future__ import annotations

import pytest
import torch

from engine.attention import AttentionBatch
from engine.backend import Backend
from engine.cache.layout import CacheLayout
from engine.cpu.called_backend import CalledBackend
from engine.decoder.layer_forms import LayerForm
from engine.decoder.model_spec import KvShape
from engine.decoder.rope import NO_ROPE
from engine.decoder.rope_table import rope_table
from engine.kv_cache import KvCache
from kernels.gated_activation.reference import Activation
from kernels.native import NativeKernels
from kernels.packed_logits_int8.reference import embed_int8, to_bytes
from kernels.program import Pool

KV_HEADS, HEADS, HEAD_DIM, BLOCK_TOKENS, NUM_BLOCKS = 2, 4, 16, 16, 8


@pytest.fixture
def pool(kernels: NativeKernels) -> Pool:
    return Pool(kernels, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("quantization", "depth", "error"),
    [
        (None, 64, 0.01),
        (None, 63, 0.01),  # of an odd number of inputs torch's
        ("int8", 64, 0.02),
        ("int8", 30, 0.02),
        ("int4", 64, 0.2),
        ("int4", 62, 0.01),  # no group fits: as it is
    ],
)
def test_products_are_those_of_torch(
    pool: Pool, dtype: torch.dtype, quantization: str | None, depth: int, error: float
) -> None:
    torch.manual_seed(5)
    weight, bias, x = (torch.randn(shape).to(dtype) for shape in ((40, depth), (40,), (7, depth)))
    product = CalledBackend(pool, dtype, quantization).linear("any", weight.clone(), bias)
    expected = x.double() @ weight.double().T + bias.double()
    for rows in (7, 1):
        found = product(x[:rows]).double()
        assert (found - expected[:rows]).norm() < error * expected[:rows].norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("quantization", "inner", "error"),
    [
        (None, 48, 0.01),
        (None, 47, 0.01),  # of an odd number of inputs torch's
        ("int8", 48, 0.03),
        ("int4", 64, 0.3),
    ],
)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_experts_that_a_model_chooses_are_those_of_torch(
    pool: Pool, dtype: torch.dtype, quantization: str | None, inner: int, error: float, activation: Activation
) -> None:
    """More rows than a group has of one expert, an expert without rows, and a choice of another type and layout."""
    torch.manual_seed(5)
    gate_up, down, x = (torch.randn(shape).to(dtype) / 8 for shape in ((5, 2 * inner, 64), (5, 64, inner), (600, 64)))
    experts = torch.rand(600, 4).argsort(dim=1)[:, :3]
    weights = torch.rand(3, 600).to(dtype).T
    found = CalledBackend(pool, dtype, quantization).routed_experts(gate_up.clone(), down.clone(), activation)
    meant = Backend().routed_experts(gate_up.double(), down.double(), activation)
    for rows in (600, 7, 1):
        expected = meant(x[:rows].double(), experts[:rows], weights[:rows].float(), None)
        off = found(x[:rows], experts[:rows], weights[:rows], None).double() - expected
        assert off.norm() < error * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize(("is_tied", "hidden"), [(True, 64), (False, 64), (True, 48), (True, 63)])
def test_a_vocabulary_keeps_its_numbers_or_those_of_bytes(
    pool: Pool, dtype: torch.dtype, is_tied: bool, hidden: int, quantization: str | None
) -> None:
    torch.manual_seed(5)
    embedding, head = (torch.randn(40, hidden).to(dtype) for _ in range(2))
    ids, h = torch.tensor([7, 39, 0]), torch.randn(3, hidden).to(dtype)
    backend = CalledBackend(pool, dtype, quantization)
    embed, to_logits = backend.vocabulary(embedding.clone(), None if is_tied else head.clone())
    output = (embedding if is_tied else head).float()
    if quantization and hidden == 64:
        levels, scales = to_bytes(output, group=64)
        output = embed_int8(torch.arange(40), levels, scales, torch.float32)
    assert torch.equal(embed(ids), output[ids].to(dtype) if is_tied else embedding[ids])
    expected = h.double() @ output.double().T
    error = 0.01 if hidden % 2 else 1e-5  # torch rounds its logits to bfloat16
    assert (to_logits(h).double() - expected).norm() < error * expected.norm()


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (0, 3.0)])
def test_attention_is_that_of_torch(pool: Pool, window: int, softcap: float) -> None:
    torch.manual_seed(5)
    form = LayerForm(rope=NO_ROPE, scale=0.3, window=window, softcap=softcap)
    caches = [
        KvCache(
            layout=CacheLayout.single(1), num_blocks=NUM_BLOCKS, block_tokens=BLOCK_TOKENS,
            kv_shapes=[KvShape(KV_HEADS, HEAD_DIM)],
            dtype=torch.float32, device=torch.device("cpu"),
        )
        for _ in range(2)
    ]  # fmt: skip
    tables = torch.tensor([[3, 1, 0], [5, 2, 0]])
    # Two prompts, then a token of one beside a chunk of the other.
    for rows, decodes in ([(0, 0, 20, 0), (20, 0, 9, 1)], 0), ([(0, 20, 1, 0), (1, 9, 8, 1)], 1):
        positions = [(table, start + i) for _, start, count, table in rows for i in range(count)]
        slots = [int(tables[t, p // BLOCK_TOKENS]) * BLOCK_TOKENS + p % BLOCK_TOKENS for t, p in positions]
        batch = AttentionBatch(
            slots=torch.tensor(slots), rows=torch.tensor(rows), tables=tables, block_tokens=BLOCK_TOKENS,
            null_block=NUM_BLOCKS, num_decodes=decodes,
        )  # fmt: skip
        qkv = torch.randn(len(slots), (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        still = rope_table(NO_ROPE, HEAD_DIM, 1, torch.float32).repeat(len(slots), 1, 1)
        found, expected = (
            backend.attend(qkv.clone(), still, None, 0.0, cache.layer(0), batch, form)
            for backend, cache in zip((CalledBackend(pool, torch.float32), Backend()), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
