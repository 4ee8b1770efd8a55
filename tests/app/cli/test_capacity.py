"""The arithmetic of a well-known model on well-known devices."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from app.cli.capacity import BLOCK_TOKENS, DEVICES, Traffic, as_kept, plan
from engine.config import EngineConfig
from engine.costs import num_step_weights, num_weights, prompt_flop, step_weight_bytes
from engine.decoder.reading import read_spec
from engine.decoder.spec import DecoderSpec
from engine.decoder.stored import Stored
from engine.decoder.stored_fp8 import StoredFp8
from engine.decoder.stored_int4 import StoredInt4
from engine.decoder.stored_numbers import NVFP4_OF_MODELOPT
from loadtest.geometries import CONFIG_BY_NAME

TRAFFIC = Traffic(prompt_tokens=1024, answer_tokens=0, concurrency=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> DecoderSpec:
    folder = tmp_path_factory.mktemp("llama")
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["llama-3.1-8b"]))
    return read_spec(str(folder))


def test_weights_cache_and_floors(llama: DecoderSpec) -> None:
    found = plan(llama, "bfloat16", DEVICES["h200"], 0.9, replace(TRAFFIC, answer_tokens=256))
    assert found.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert found.kv_bytes_per_token == 131_072
    # 0.9 of 141 GB less the weights.
    assert found.cache_tokens == pytest.approx((126.9e9 - 16.06e9) / 131_072, rel=1e-3)
    assert found.max_concurrency == found.cache_tokens // 1280
    # 15.01 GB of weights and 1,152 tokens of cache at 4.8 TB/s.
    assert found.tpot_s == pytest.approx((15.01e9 + 1152 * 131_072) / 4.8e12, rel=1e-3)
    assert found.ttft_s == pytest.approx(0.0149, rel=0.05)


def test_a_step_reads_the_experts_that_its_rows_meet(tmp_path: Path) -> None:
    """Of 30.5 billion weights a step of one row reads 3; each of 48 layers has 128 experts of 4.72 million."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["qwen3-30b-a3b"]))
    spec = read_spec(str(tmp_path))
    assert num_weights(spec) == 30_532_122_624
    assert num_step_weights(spec) == pytest.approx(3.04e9, rel=0.01)
    assert step_weight_bytes(spec, 2) == pytest.approx(2 * num_step_weights(spec))
    met = 1 - (15 / 16) ** 32
    alone = 30_532_122_624 - 151936 * 2048 - 48 * 128 * 3 * 2048 * 768
    assert num_step_weights(spec, 32) == pytest.approx(alone + met * 48 * 128 * 3 * 2048 * 768)
    assert prompt_flop(spec, 1) == pytest.approx(2 * (num_step_weights(spec) - 151936 * 2048), rel=0.001)
    awq = replace(spec, stored=StoredInt4(method="awq", group_size=128))
    assert step_weight_bytes(awq, 2) == pytest.approx(0.53 * 2.73e9 + 2 * 0.311e9, rel=0.02)


def test_experts_of_gpt_oss_are_counted_in_four_bits(tmp_path: Path) -> None:
    """Of 20.9 billion weights 19.1 are experts', 2,880 numbers and 92 bytes of scales in 1,532 bytes."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["gpt-oss-20b"]))
    spec = read_spec(str(tmp_path))
    assert num_weights(spec) == 20_914_757_184
    experts = 24 * 32 * 3 * 2880 * 2880
    others = 2 * (20_914_757_184 - experts)
    found = plan(spec, "bfloat16", DEVICES["h200"], 0.9, replace(TRAFFIC, answer_tokens=256))
    assert found.weight_bytes == pytest.approx(others + experts * 1532 / 2880)
    unread = 2 * 201_088 * 2880
    assert step_weight_bytes(spec, 2) == pytest.approx(others - unread + experts * 1532 / 2880 / 8)
    numbers = replace(spec, stored=None)
    assert step_weight_bytes(numbers, 2) == pytest.approx(others - unread + 2 * experts / 8)


def test_weights_of_few_bits_are_counted_as_they_are_held(llama: DecoderSpec) -> None:
    """6.98 of 8.03 billion weights are the layers': half a byte each and four for each group, or a byte."""
    layers, others = 6.980e9, 2 * (8.030e9 - 6.980e9)
    for group_size, per_weight in ((128, 0.5 + 4 / 128), (32, 0.5 + 4 / 32), (-1, 0.5)):
        awq = replace(llama, stored=StoredInt4(method="awq", group_size=group_size))
        found = plan(awq, "bfloat16", DEVICES["h200"], 0.9, replace(TRAFFIC, answer_tokens=256))
        assert found.weight_bytes == pytest.approx(others + per_weight * layers, rel=3e-3)
        # One embedding is not read.
        step_bytes = found.weight_bytes - 1.051e9 + 1152 * 131_072
        assert found.tpot_s == pytest.approx(step_bytes / 4.8e12, rel=3e-3)


@pytest.mark.parametrize(
    ("stored", "dtype", "device", "per_weight"),
    [
        (StoredFp8(), "bfloat16", "h200", 1),
        (StoredFp8(), "bfloat16", "a100-80", 2),
        (StoredFp8(), "float16", "h200", 2),
        (StoredFp8(block=(128, 128)), "bfloat16", "h200", 2),
    ],
)
def test_weights_of_8_bits_stay_so_where_they_are_multiplied(
    llama: DecoderSpec, stored: StoredFp8, dtype: str, device: str, per_weight: int
) -> None:
    kept = as_kept(replace(llama, stored=stored), dtype, DEVICES[device])
    plain, found = (
        plan(spec, dtype, DEVICES[device], 0.9, replace(TRAFFIC, answer_tokens=256)) for spec in (llama, kept)
    )
    assert plain.weight_bytes - found.weight_bytes == pytest.approx((2 - per_weight) * 6.980e9, rel=3e-3)
    # Their products are twice as fast, attention's are not.
    assert found.ttft_s == pytest.approx(plain.ttft_s * (per_weight / 2), rel=0.03)


@pytest.mark.parametrize("stored", [StoredInt4(method="gptq", group_size=128, has_order=True), NVFP4_OF_MODELOPT])
def test_weights_that_nothing_multiplies_by_are_numbers(llama: DecoderSpec, stored: Stored) -> None:
    assert as_kept(replace(llama, stored=stored), "bfloat16", DEVICES["h200"]) == llama


def test_what_layers_keep_instead_of_keys_is_counted(llama: DecoderSpec) -> None:
    class WithStates(DecoderSpec):
        def state_bytes(self, element_bytes: int) -> int:
            return 50 << 20

    traffic = replace(TRAFFIC, answer_tokens=256, concurrency=8)
    plain = plan(llama, "bfloat16", DEVICES["h200"], 0.9, traffic)
    kept = plan(
        WithStates(**{f.name: getattr(llama, f.name) for f in fields(llama)}), "bfloat16", DEVICES["h200"], 0.9, traffic
    )
    assert kept.max_concurrency < plain.max_concurrency
    # Of what those of rows leave a third is for states at the ends of prefixes.
    assert kept.cache_tokens == pytest.approx(plain.cache_tokens * 2 / 3, abs=16)
    assert kept.tpot_s - plain.tpot_s == pytest.approx(8 * 2 * (50 << 20) / DEVICES["h200"].bytes_per_s)


def test_weights_of_4_bits_stay_so(llama: DecoderSpec) -> None:
    kept = replace(llama, stored=StoredInt4(method="gptq", group_size=128))
    assert as_kept(kept, "float16", DEVICES["a100-80"]) == kept


def test_more_at_once_is_slower_for_each_and_faster_for_all(llama: DecoderSpec) -> None:
    plans = [
        plan(llama, "bfloat16", DEVICES["h100"], 0.9, Traffic(prompt_tokens=512, answer_tokens=256, concurrency=count))
        for count in (1, 8, 64)
    ]
    assert [found.tpot_s for found in plans] == sorted(found.tpot_s for found in plans)
    assert [found.tokens_per_s for found in plans] == sorted(found.tokens_per_s for found in plans)


def test_adapters_take_memory_and_time(llama: DecoderSpec) -> None:
    traffic = Traffic(prompt_tokens=512, answer_tokens=256, concurrency=64)
    without, with_them = (
        plan(llama, "bfloat16", DEVICES["h200"], 0.9, replace(traffic, num_adapters=count)) for count in (0, 64)
    )
    assert with_them.adapter_bytes == pytest.approx(64 * 84e6, rel=0.01)
    assert with_them.cache_tokens < without.cache_tokens
    assert with_them.tpot_s > without.tpot_s


def test_a_model_that_does_not_fit_says_so(llama: DecoderSpec) -> None:
    traffic = Traffic(prompt_tokens=512, answer_tokens=256, concurrency=64, price_per_hour=1.0)
    found = plan(llama, "float32", DEVICES["l4"], 0.9, traffic)
    assert (found.cache_tokens, found.max_concurrency, found.tokens_per_s) == (0, 0, 0.0)
    assert found.cost_per_million == float("inf")


def test_cost_is_price_over_tokens(llama: DecoderSpec) -> None:
    traffic = Traffic(prompt_tokens=512, answer_tokens=256, concurrency=64, price_per_hour=3.6)
    found = plan(llama, "bfloat16", DEVICES["h200"], 0.9, traffic)
    assert found.cost_per_million == pytest.approx(1000 / found.tokens_per_s)


def test_places_that_stay_empty_hold_no_tokens(tmp_path: Path) -> None:
    """Three layers see everything and four do not: there are three tables of three places, for seven layers."""
    changed = {"num_hidden_layers": 7, "layer_types": ["full_attention"] * 3 + ["sliding_attention"] * 4}
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["gpt-oss-20b"] | changed))
    found = plan(read_spec(str(tmp_path)), "bfloat16", DEVICES["h200"], 0.9, TRAFFIC)
    left = 0.9 * 141e9 - found.weight_bytes
    assert found.cache_tokens == pytest.approx(left / (found.kv_bytes_per_token * 9 / 7), rel=1e-3)


def test_windows_leave_room_for_more(tmp_path: Path) -> None:
    """Of gpt-oss every other layer sees 128 tokens of an answer, and keeps 128 more and up to two blocks."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2} | CONFIG_BY_NAME["gpt-oss-20b"]))
    spec = read_spec(str(tmp_path))
    found = plan(spec, "bfloat16", DEVICES["h200"], 0.9, replace(TRAFFIC, prompt_tokens=8000, answer_tokens=192))
    assert found.max_concurrency == int(found.cache_tokens / ((8192 + 288) / 2))
    assert EngineConfig(model_path="").block_tokens == BLOCK_TOKENS
