"""The same without our own kernels, as on a machine that has no compiler: torch's operators give the same tokens."""

from __future__ import annotations

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from tests.parity.conftest import BUNDLED, Checkpoint, greedy, make_engine, random_prompts, run_engine


@pytest.fixture(autouse=True)
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.native.load", lambda: None)


def test_a_mixed_batch_gets_the_tokens_of_transformers(family: Checkpoint) -> None:
    """Of more tokens than a step has, so that some prompts are read whole, together, and others in chunks."""
    engine = make_engine(family, max_batched_tokens=50, max_num_seqs=8)
    prompts = random_prompts(8, longest=70)
    found = run_engine(engine, [greedy(str(i), prompt) for i, prompt in enumerate(prompts)])
    assert found == {str(i): family.generate(prompt) for i, prompt in enumerate(prompts)}


@pytest.mark.parametrize(
    ("block_tokens", "words"), [(16, "cannot be compiled or loaded here; a warning"), (8, "multiples of 16")]
)
def test_quantization_without_kernels_is_refused_with_the_reason(block_tokens: int, words: str) -> None:
    """A lack of a compiler and the geometry were one message, and a compiler that was cut off was neither."""
    config = EngineConfig(model_path=str(BUNDLED), quantization="int8", block_tokens=block_tokens)
    with pytest.raises(ConfigError, match=f"quantization: 'int8' needs .*{words}"):
        build_engine(config)
