"""The same without our own kernels, as on a machine that has no compiler: torch's operators give the same tokens."""

from __future__ import annotations

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from tests.parity.conftest import Checkpoint, greedy, random_prompts, run_engine


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.native.load", lambda: None)


@pytest.mark.parametrize("options", [{}, {"max_batched_tokens": 7, "max_num_seqs": 7}], ids=["at once", "chunks of 7"])
def test_a_mixed_batch_gets_the_tokens_of_transformers(family: Checkpoint, options: dict[str, int]) -> None:
    engine = build_engine(EngineConfig(model_path=family.path, dtype="float32", num_threads=1, **options))
    prompts = random_prompts(8, longest=70)
    found = run_engine(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert found == {str(i): family.generate(prompt) for i, prompt in enumerate(prompts)}
