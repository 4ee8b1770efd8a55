from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from loadtest.bench_engine import engine_config
from loadtest.measure import Exchange
from loadtest.overhead import alike, overhead_of, parse

STDLIB_CHAT = Path(__file__).parents[2] / "models" / "stdlib-chat"


def exchange(first_ms: float, token_ms: float, error: str | None = None) -> Exchange:
    times = [first_ms + token_ms * place for place in range(5)]
    return Exchange(
        workload="w",
        model="m",
        started_s=0.0,
        status=200,
        error=error,
        event_ms=times,
        end_ms=times[-1],
        completion_tokens=5,
    )


def test_what_http_adds_is_the_difference_of_medians() -> None:
    found = overhead_of(1, [exchange(10, 2), exchange(12, 4), exchange(50, 3)], [exchange(15, 3.5)])
    assert (found.engine_ttft_ms, found.http_ttft_ms) == (12, 15)
    assert (found.engine_tpot_ms, found.http_tpot_ms) == (3, 3.5)
    assert found.row() == ["1", "12.0", "15.0", "3.00", "3.00", "3.50", "0.50"]


def test_a_failed_request_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="HTTP 429"):
        overhead_of(1, [exchange(1, 1)], [exchange(1, 1, "HTTP 429: full")])


def test_an_answer_in_one_piece_is_no_measurement() -> None:
    whole = Exchange(workload="w", model="m", started_s=0, status=200, error=None, event_ms=[5.0], completion_tokens=9)
    with pytest.raises(ValueError, match="long enough"):
        overhead_of(1, [exchange(1, 1)], [whole])


def test_nonsense_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--checkpoint", str(STDLIB_CHAT), "--streams", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_its_options_are_enough_for_an_engine() -> None:
    """They were copied from the engine's own benchmark, and one that came later was not."""
    options = parse(["--checkpoint", str(STDLIB_CHAT), "--streams", "1,8", "--quantization", "int8"])
    config = engine_config(options, STDLIB_CHAT)
    assert (config.max_num_seqs, config.quantization) == (8, "int8")


def test_the_engine_drafts_like_the_server() -> None:
    """On a CPU a server drafts by default, and this engine never did: HTTP seemed to make tokens faster."""
    line = ["--checkpoint", str(STDLIB_CHAT)]
    assert alike(parse(line)).num_speculative_tokens is EngineConfig(model_path="m").num_speculative_tokens
    assert alike(parse([*line, "--draft-tokens", "4"])).num_speculative_tokens == 4
    assert alike(parse(line)).max_decode_gap_s is None
