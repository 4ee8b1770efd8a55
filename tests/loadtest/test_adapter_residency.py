from __future__ import annotations

import random
from pathlib import Path

import pytest

from adapters.identity import AdapterDigest
from engine.build import build_engine
from engine.config import EngineConfig
from loadtest.adapter_residency import Round, Streams, by_zipf, compared, draws, measure, one_of, write_adapters
from loadtest.engine_alone import EngineAlone

MODEL = "models/stdlib-chat"


def test_streams_over_more_adapters_than_slots_are_all_answered(tmp_path: Path) -> None:
    refs = write_adapters(tmp_path, MODEL, 4, rank=1)
    config = EngineConfig(
        model_path=MODEL, num_threads=1, max_num_seqs=3, max_model_len=64, max_device_adapters=2, kv_cache_bytes=1 << 22
    )
    alone = EngineAlone(build_engine(config, refs))
    streams = Streams(alone=alone, num_streams=3, answer_tokens=2)
    cases = {"all": one_of([ref.digest for ref in refs])}
    (found,) = measure(streams, cases, requests=7, repeats=1)
    [[first]] = found.values()
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
    row_by_name = {row.name: row for row in compared(rounds)}
    zipf, twice = (
        row_by_name[name]
        for name in ("all by Zipf: tokens/s, of one adapter", "twice the slots: TTFT p50 ms, of as many as slots")
    )
    assert (zipf.value, zipf.ratio) == (90.0, pytest.approx(0.9))
    assert (zipf.target, zipf.verdict) == ("at least 0.85", "met")
    assert twice.ratio == pytest.approx(1.7)
    assert (twice.target, twice.verdict) == ("under 2", "met")
    assert row_by_name["twice the slots: tokens/s, of as many as slots"].verdict == ""
    worse = rounds | {
        "zipf": [Round(tokens_per_s=84.9, ttft_ms=[15.0])],
        "twice": [Round(tokens_per_s=80.0, ttft_ms=[20.0])],
    }
    assert [row.verdict for row in compared(worse) if row.target] == ["MISSED", "MISSED"]


def test_the_cases_draw_of_what_they_are_named_for() -> None:
    digests = [AdapterDigest(str(number)) for number in range(8)]
    rng = random.Random(2)
    drawn = {case: {draw(rng) for _ in range(500)} for case, draw in draws(digests, 2, 1.0).items()}
    wanted = {"one": digests[:1], "zipf": digests, "fits": digests[:2], "twice": digests[:4]}
    assert drawn == {case: set(some) for case, some in wanted.items()}
