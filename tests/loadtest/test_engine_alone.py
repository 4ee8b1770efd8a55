from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import EngineError, RequestError
from engine.request import FinishReason
from loadtest.engine_alone import EngineAlone
from loadtest.geometries import CONFIG_BY_NAME, write_checkpoint
from tests.loadtest.test_geometries import SMALL


def started(folder: Path) -> EngineAlone:
    write_checkpoint(CONFIG_BY_NAME["smollm2-135m"] | SMALL, folder)
    config = EngineConfig(
        model_path=str(folder),
        device="cpu",
        dtype="float32",
        num_threads=1,
        max_num_seqs=4,
        num_speculative_tokens=0,
    )
    return EngineAlone(build_engine(config))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineAlone]:
    alone = started(tmp_path_factory.mktemp("checkpoint"))
    yield alone
    alone.close()


def test_every_prompt_gets_its_number_of_tokens(engine: EngineAlone) -> None:
    found = engine.generate([[5, 6, 7], [8, 9]], [4, 9])
    assert [one.completion_tokens for one in found.exchanges] == [4, 9]
    assert [one.prompt_tokens for one in found.exchanges] == [3, 2]
    assert all(one.is_ok and one.ttft_ms and one.end_ms >= one.ttft_ms for one in found.exchanges)
    assert found.prefill_s > 0
    assert found.full_split.num_steps == 3


def test_the_parts_of_a_step_fit_into_the_step(engine: EngineAlone) -> None:
    split = engine.generate([[5, 6, 7, 8]], [16]).full_split
    assert split.num_steps == 15
    assert 0 < sum(split.ms_by_part.values()) <= split.wall_ms * 1.001
    assert split.ms_by_part.keys() == {"schedule", "prepare", "forward", "sample", "wait", "emit"}


def test_more_prompts_than_rows_are_run_too(engine: EngineAlone) -> None:
    found = engine.generate([[10 + place] for place in range(7)], [3] * 7)
    assert [one.completion_tokens for one in found.exchanges] == [3] * 7


def test_a_prompt_that_does_not_fit_is_refused(engine: EngineAlone) -> None:
    with pytest.raises(RequestError):
        engine.generate([[5] * 1000], [3])


def test_prompts_beside_one_that_does_not_fit_are_not_run(engine: EngineAlone) -> None:
    with pytest.raises(RequestError):
        engine.generate([[5, 6, 7], [5] * 1000], [50, 3])
    assert engine.generate([[5, 6, 7]], [2]).exchanges[0].completion_tokens == 2


def test_a_batch_that_fails_leaves_nothing_to_the_next(engine: EngineAlone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other requests went on, and the next batch, and all after it, failed by their tokens."""
    step, num_steps = engine.engine.step, 0

    def failing() -> list[Any]:
        nonlocal num_steps
        num_steps += 1
        emissions = step()
        if num_steps == 3:
            emissions[0] = replace(emissions[0], finish_reason=FinishReason.FAILED, error="not finite")
        return emissions

    monkeypatch.setattr(engine.engine, "step", failing)
    with pytest.raises(RuntimeError, match="not finite"):
        engine.generate([[20 + place] for place in range(7)], [40] * 7)
    before = engine.engine.snapshot().num_steps
    found = engine.generate([[5, 6, 7], [8, 9]], [4, 4])
    assert [one.completion_tokens for one in found.exchanges] == [4, 4]
    assert engine.engine.snapshot().num_steps - before <= 6


def test_an_engine_that_fails_is_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = started(tmp_path)
    step = alone.engine.step

    def failing() -> list[Any]:
        step()
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(alone.engine, "step", failing)
    with pytest.raises(RuntimeError, match="illegal"):
        alone.generate([[5, 6, 7]], [4])
    with pytest.raises(EngineError, match="shutting down"):
        alone.generate([[5, 6, 7]], [4])
    alone.close()
