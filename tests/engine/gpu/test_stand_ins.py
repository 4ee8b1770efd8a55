"""Keys, values and an adapter that no request has brought, in the forms in which requests bring them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.adapter_tables import entries_of, entry_of
from engine.decoder.reading import read_spec
from engine.decoder.spec import DecoderSpec
from engine.gpu.adapters import TritonLora
from engine.gpu.runtime import CudaRuntime
from engine.gpu.stand_ins import SPREAD, StandInAdapter, fill_randomly
from engine.gpu.tabled_adapter import RANK
from engine.kv_cache import KvCache
from kernels.row_quantization.reference import dequantize_rows
from loadtest.geometries import CONFIG_BY_NAME
from tests.kernels.gpu.conftest import DEVICE

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
TINY |= {"num_key_value_heads": 1, "vocab_size": 70, "eos_token_id": 2, "hidden_act": "silu"}


@pytest.fixture
def spec(tmp_path: Path) -> DecoderSpec:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG_BY_NAME["llama-3.1-8b"] | TINY))
    return read_spec(str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn])
def test_all_blocks_but_the_null_block_hold_numbers_of_every_size(spec: DecoderSpec, dtype: torch.dtype) -> None:
    cache = KvCache.of(spec, num_blocks=5, block_tokens=4, dtype=dtype, device=DEVICE)
    fill_randomly(cache, spec.num_layers)
    for index in range(spec.num_layers):
        k, v, spans, _ = cache.layer(index)
        parts = (k, v) if spans is None else map(dequantize_rows, (k.cpu(), v.cpu()), [part.cpu() for part in spans])
        for part in parts:
            numbers = part.cpu().float()
            assert not numbers[5].any()
            for block in numbers[:5].flatten(1):
                assert block.max() > SPREAD / 2
                assert block.min() < -SPREAD / 2
                assert block.abs().max() <= SPREAD
        assert not torch.equal(k[0].cpu().float(), v[0].cpu().float())


@pytest.mark.parametrize("max_rank", [3, 100])
def test_an_adapter_adds_to_every_linear_module_about_as_much_as_its_inputs_are(
    spec: DecoderSpec, max_rank: int
) -> None:
    """To the first token alone, to the others together, and to no more than were said."""
    adapter = StandInAdapter(spec, max_rank, torch.float32, DEVICE)
    lora = TritonLora(CudaRuntime(DEVICE), 4, max_rank, 4)
    x = torch.randn(4, 32, device=DEVICE)
    for count in (1, 3):
        lora.expect(count, table=adapter.table)
        y = lora.multiply(lambda x: x.new_zeros(4, 96), x, 1, ("gate_proj", "up_proj"), (48, 48)).cpu()
        expected = x[:count].cpu() @ adapter._a.cpu().flatten()[: len(adapter._a) * 32].view(-1, 32).T
        expected = expected @ adapter._b.cpu()[:48, : len(adapter._a)].T
        torch.testing.assert_close(y[:count], expected.repeat(1, 2), atol=1e-4, rtol=1e-4)
        assert 0.2 < y[:count].std() < 5
        assert not y[count:].any()
    lora.expect(0)
    ranks = adapter.table.cpu()[:, RANK]
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    with_rank = [entry_of(layer, module, entries_of(spec)) for layer in range(2) for module in modules]
    assert ranks.nonzero().flatten().tolist() == sorted(with_rank)
