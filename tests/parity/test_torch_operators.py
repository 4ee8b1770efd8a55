"""The same without our own kernels, as on a machine that has no compiler: torch's operators give the same tokens."""

from __future__ import annotations

import pytest

from tests.parity.conftest import Checkpoint, greedy, make_engine, random_prompts, run_engine


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.native.load", lambda: None)


def test_a_mixed_batch_gets_the_tokens_of_transformers(family: Checkpoint) -> None:
    """Of more tokens than a step has, so that some prompts are read whole, together, and others in chunks."""
    engine = make_engine(family, max_batched_tokens=50, max_num_seqs=8)
    prompts = random_prompts(8, longest=70)
    found = run_engine(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert found == {str(i): family.generate(prompt) for i, prompt in enumerate(prompts)}
