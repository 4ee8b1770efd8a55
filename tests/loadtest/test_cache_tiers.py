"""The benchmark of the cache's tiers, on the bundled model and few tokens."""

from __future__ import annotations

from engine.config import EngineConfig
from loadtest.cache_tiers import measure


def test_every_case_has_a_row() -> None:
    config = EngineConfig(model_path="models/stdlib-chat", num_threads=1, dtype="float32", max_num_seqs=1)
    rows = measure(config, num_conversations=2, num_tokens=40)
    assert [case for case, *_ in rows] == [
        "computed anew",
        "all in the cache",
        "half in the cache, the rest on disk",
        "after a restart, first turn",
    ]
    assert rows[0][2] == "1.00"
