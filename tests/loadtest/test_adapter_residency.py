from __future__ import annotations

import random
from pathlib import Path

import pytest

from adapters.identity import AdapterDigest
from engine.build import build_engine
from engine.config import EngineConfig
from loadtest.adapter_residency import Round, Streams, by_zipf, measure, one_of, rows_of, write_adapters
from loadtest.engine_alone import EngineAlone

MODEL = "models/stdlib-chat"


def test_streams_over_more_adapters_than_slots_are_all_answered(tmp_path: Path) -> None:
    refs = write_adapters(tmp_path, MODEL, 4, rank=1)
    config = EngineConfig(
        model_path=MODEL, num_threads=1, max_num_seqs=3, max_model_len=64, max_device_adapters=2, kv_cache_bytes=1 << 22
    )
    alone = EngineAlone(build_engine(config, refs))
    streams = Streams(alone=alone, num_streams=3, answer_tokens=2)
    draws = {"all": one_of([ref.digest for ref in refs])}
    [[first]] = measure(streams, draws, requests=7, repeats=1).values()
    alone.close()
    assert len(first.ttft_ms) == 7
    assert min(first.ttft_ms) > 0
    assert streams.num_asked == 14


def test_the_first_by_zipf_is_asked_for_most() -> None:
    digests = [AdapterDigest(str(number)) for number in range(100)]
    draw, rng = by_zipf(digests, 1.0), random.Random(1)
    drawn = [draw(rng) for _ in range(5000)]
    # 1 / (1 + 1/2 + ... + 1/100)
    assert drawn.count(digests[0]) / 5000 == pytest.approx(0.193, abs=0.03)


def test_ratios_are_of_rounds_side_by_side() -> None:
    rounds = {
        "one": [Round(tokens_per_s=100.0, ttft_ms=[10.0])],
        "zipf": [Round(tokens_per_s=90.0, ttft_ms=[15.0])],
        "fits": [Round(tokens_per_s=95.0, ttft_ms=[10.0])],
        "twice": [Round(tokens_per_s=80.0, ttft_ms=[5.0, 17.0, 60.0])],
    }
    ratio_by_label = {row[0]: float(row[2]) for row in rows_of(rounds)}
    assert ratio_by_label["all by Zipf: tokens/s, of one adapter"] == pytest.approx(0.9)
    assert ratio_by_label["twice the slots: TTFT p50 ms, of as many as slots"] == pytest.approx(1.7)
