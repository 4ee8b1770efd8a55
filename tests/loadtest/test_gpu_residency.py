"""More adapters than fit on a GPU, simulated and small."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.gpu.tabled_adapter import NUM_PIECES, PinnedAdapter, TabledAdapter
from kernels.lora_shrink import launch as shrink_launch
from kernels.streamed_linear import launch as streamed_launch
from loadtest import adapter_residency
from loadtest.geometries import CONFIG_BY_NAME
from loadtest.gpu import __main__ as command
from loadtest.gpu import residency, summary
from loadtest.gpu.parts import Notes
from tests.parity.gpu_parts import Replays
from tests.simulated_gpu.device import in_order

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 1000,
    "max_position_embeddings": 128,
}
CROWD = residency.Crowd(layers=1, registered=6, preloaded=3, slots=2, streams=2, answer_tokens=1, requests=3, repeats=1)


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Replays]:
    monkeypatch.setattr(shrink_launch, "PROGRAMS_WANTED", 2)
    monkeypatch.setattr(streamed_launch, "PROGRAMS_WANTED", 2)
    with in_order():
        yield Replays(monkeypatch, target="sm_80")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the benchmark itself runs there")
def test_adapters_that_do_not_fit_are_copied_again_and_the_comparisons_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    copied: list[int] = []
    to = PinnedAdapter.to

    def noted(self: PinnedAdapter, *arguments: Any) -> TabledAdapter:
        copied.append(self._pieces[0].data_ptr())
        return to(self, *arguments)

    monkeypatch.setattr(PinnedAdapter, "to", noted)
    monkeypatch.setitem(CONFIG_BY_NAME, "tiny", CONFIG_BY_NAME["llama-3.1-8b"] | TINY)
    for module in (adapter_residency, residency):
        monkeypatch.setattr(module, "PROMPT_TOKENS", 4)
    monkeypatch.setattr(command, "BASE_MODELS", ("tiny",))
    options = {"dtype": "float32", "max_batched_tokens": 8, "num_threads": 1, "kv_cache_bytes": 1 << 20}
    monkeypatch.setattr(residency, "measure", partial(residency.measure, **options))
    command.measure_residency(Notes(tmp_path / "notes"), CROWD, ", small")
    told = json.loads((tmp_path / "notes").read_text())
    assert [row["name"] for row in told["residency"]] == [
        f"{wanted.name}, small" for wanted in adapter_residency.COMPARISONS
    ]
    assert all(row["ratio"] > 0 < row["value"] for row in told["residency"])
    assert {row["verdict"] for row in told["residency"] if row["target"]} <= {"met", "MISSED"}
    assert told["crowd"]["registered"] == 6
    assert told["crowd"]["shared"] == residency.SHARED
    # Each has host memory of its own, and two slots for three or more cannot keep them all.
    assert len(set(copied)) >= 3
    assert len(copied) > 3
    text = summary.summary({"parts": {"residency": told | {"error": None, "seconds": 1.0}}})
    for known in ("more adapters than fit", "all by Zipf: tokens/s, of one adapter"):
        assert known in text
    assert "all by Zipf" in capsys.readouterr().out


def test_what_is_told_of_sizes_is_so() -> None:
    """An adapter of 8 layers of Llama-3.1-8B's is 20 MiB, in host memory, too; the most popular are all there."""
    config, crowd = CONFIG_BY_NAME["llama-3.1-8b"], residency.Crowd()
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    features = 2 * (hidden + hidden) + 2 * (hidden + kv) + 3 * (hidden + inner)
    adapter_bytes = 2 * residency.RANK * features * crowd.layers
    assert adapter_bytes == 20 << 20
    assert adapter_bytes % (2 << 20) == 0 < adapter_bytes <= NUM_PIECES * (2 << 20)
    assert crowd.preloaded <= crowd.host_bytes // adapter_bytes == 409
    whole = residency.ALL_IN_HOST_MEMORY
    assert whole.preloaded == whole.registered <= whole.host_bytes // adapter_bytes
    assert crowd.slots * adapter_bytes <= residency.ADAPTER_BYTES
    assert crowd.host_bytes * config["num_hidden_layers"] == crowd.layers * (32 << 30)
