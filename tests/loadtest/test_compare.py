from __future__ import annotations

import json
import math
import threading
from collections import Counter

import pytest

from loadtest import compare as module
from loadtest.compare import (
    Cell,
    Comparison,
    Prompts,
    cell_of,
    compare,
    long_arrival,
    shared_prefix,
    short_behind_long,
    with_ratio,
    workloads,
)
from loadtest.measure import Exchange, summarise
from loadtest.servers import Server
from loadtest.stream_client import StreamClient
from loadtest.workloads import TokenRange
from tests.loadtest.scripted_server import answer, scripted_server

IDS = TokenRange()
PROMPTS = Prompts(model="base", round_name="r", ids=IDS, ignore_eos=True)


@pytest.fixture(autouse=True)
def _soon_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEHIND_S", 0.01)


class Recorder:
    """A script that answers and remembers what was asked; handler threads share it."""

    def __init__(self) -> None:
        self.asked: list[dict[str, object]] = []
        self._lock = threading.Lock()

    def __call__(self, body: dict[str, object]) -> list[bytes]:
        with self._lock:
            self.asked.append(body)
        return answer(body)

    def lengths(self) -> list[int]:
        return [len(body["prompt"]) for body in self.asked]  # type: ignore[arg-type]


def test_every_server_gets_the_same_prompts_and_every_repetition_new_ones() -> None:
    ours, theirs = Recorder(), Recorder()
    with scripted_server(ours) as our_url, scripted_server(theirs) as their_url:
        servers = [Server(name="a", url=our_url, model="base"), Server(name="b", url=their_url, model="other")]
        found = compare(servers, repeats=2, seed=0, ids=IDS, ignore_eos=True, settle_s=0)

    def prompts(recorder: Recorder) -> list[str]:
        return sorted(json.dumps(body["prompt"]) for body in recorder.asked)

    assert prompts(ours) == prompts(theirs)
    assert len(set(prompts(ours))) == len(prompts(ours))
    assert {body["model"] for body in theirs.asked} == {"other"}
    assert list(found.cell_by_server_by_row) == [row for rows in workloads(None) for row in rows]
    assert found.errors == ()
    assert found.table().count("\n") == 1 + 2 * len(found.cell_by_server_by_row)
    assert json.loads(found.to_json())["rows"]["32 streams, same"].keys() == {"a", "b"}


def test_prompts_can_be_words_instead_of_token_ids() -> None:
    prompts = Prompts(model="base", round_name="r", ids=IDS, ignore_eos=True, words=(" ab", " cd", " ef"))
    ask = prompts.ask("w", [0, 4, 2, 300], 8)
    assert ask.body["prompt"] == " ab cd ef ab"


def test_the_warm_requests_share_the_cold_one_s_prefix() -> None:
    recorder = Recorder()
    with scripted_server(recorder) as url:
        (cold,), warm = shared_prefix(1024)(StreamClient(url, concurrency=8), PROMPTS)
    assert (cold.workload, [one.workload for one in warm]) == ("cold", ["warm"] * 4)
    prompts = [body["prompt"] for body in recorder.asked]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1  # type: ignore[index]
    assert len({tuple(prompt) for prompt in prompts}) == 5  # type: ignore[arg-type]


def test_the_long_prompt_arrives_after_the_others_have_begun() -> None:
    recorder = Recorder()
    with scripted_server(recorder) as url:
        decoding, (arrival,) = long_arrival(4096)(StreamClient(url, concurrency=8), PROMPTS)
    assert recorder.lengths() == [128] * 4 + [4096]
    assert all(one.started_s + one.event_ms[0] / 1000 <= arrival.started_s + 0.005 for one in decoding)


def test_short_prompts_are_sent_after_the_long_one() -> None:
    recorder = Recorder()
    with scripted_server(recorder) as url:
        short, (long,) = short_behind_long(4096)(StreamClient(url, concurrency=8), PROMPTS)
    assert recorder.lengths() == [4096] + [64] * 4
    assert all(one.started_s > long.started_s for one in short)


def test_a_refusal_is_shown_and_does_not_end_the_comparison() -> None:
    def refuse_long(body: dict[str, object]) -> list[bytes] | tuple[int, bytes]:
        if len(body["prompt"]) > 2000:  # type: ignore[arg-type]
            return 400, b'{"error": {"message": "too long"}}'
        return answer(body)

    with scripted_server(refuse_long) as url:
        found = compare(
            [Server(name="a", url=url, model="base")], repeats=1, seed=0, ids=IDS, ignore_eos=True, settle_s=0
        )
    assert found.errors == (
        "a, 4 decoding while 4,096 tokens arrive: HTTP 400: too long",
        "a, 4 short prompts behind 4,096 tokens: HTTP 400: too long",
    )
    assert found.cell_by_server_by_row["the long prompt itself"]["a"].num_errors == 1
    told = json.loads(found.to_json())["rows"]["the long prompt itself"]["a"]
    assert told["TTFT p50 ms"] is None
    assert told["errors"] == 1


def test_another_run_has_other_prompts() -> None:
    """A second comparison of running servers found the "cold" prefix of the first in their caches."""
    recorder = Recorder()
    with scripted_server(recorder) as url:
        for seed in (1, 2):
            compare([Server(name="a", url=url, model="m")], repeats=1, seed=seed, ids=IDS, ignore_eos=True, settle_s=0)
    prompts = [json.dumps(body["prompt"]) for body in recorder.asked]
    assert len(set(prompts)) == len(prompts)


def test_the_first_answers_of_a_server_are_not_measured() -> None:
    """What a server does once, such as compiling, was part of the medians."""
    asked: Counter[int] = Counter()
    lock = threading.Lock()

    def fail_at_first(body: dict[str, object]) -> list[bytes] | tuple[int, bytes]:
        with lock:
            asked[len(body["prompt"])] += 1  # type: ignore[arg-type]
            return answer(body) if asked.total() > 1 else (500, b"")

    with scripted_server(fail_at_first) as url:
        servers = [Server(name="a", url=url, model="base")]
        found = compare(servers, repeats=2, seed=0, ids=IDS, ignore_eos=True, settle_s=0)
    assert found.errors == ()
    # Two workloads send so many.
    assert asked[4096] == 2 * 3


def test_prompts_are_cut_to_the_shortest_context_that_a_server_lists() -> None:
    """A model with a context of 2,048 tokens was sent 4,096, and had errors instead of figures."""
    recorder = Recorder()
    with scripted_server(recorder) as url:
        servers = [
            Server(name="a", url=url, model="base", context_tokens=2048),
            Server(name="b", url=url, model="base", context_tokens=1024),
            Server(name="c", url=url, model="base"),
        ]
        found = compare(servers, repeats=1, seed=0, ids=IDS, ignore_eos=True, settle_s=0)
    rows = [*found.cell_by_server_by_row]
    assert "968-token prefix, cold" in rows
    assert "4 decoding while 1,000 tokens arrive" in rows
    longest = max(len(body["prompt"]) + body["max_tokens"] for body in recorder.asked)  # type: ignore[arg-type, operator]
    assert longest <= 1024
    with pytest.raises(SystemExit, match="a context of 512 tokens is too short"):
        workloads(512)


def test_a_repetition_without_an_answer_is_left_out_of_the_medians() -> None:
    """A NaN among the values made their median any of them."""

    def answered(ttft_ms: float) -> Exchange:
        times = [ttft_ms, ttft_ms + 1]
        return Exchange(workload="w", model="m", started_s=0, status=200, error=None, event_ms=times, end_ms=times[1])

    failed = Exchange(workload="w", model="m", started_s=0, status=500, error="no")
    rounds = [summarise([one], label="r") for one in (answered(7), answered(3), failed, answered(5))]
    found = cell_of(rounds)
    assert (found.ttft_ms, found.num_errors) == (5, 1)
    assert math.isnan(cell_of(rounds[2:3]).ttft_ms)


def test_ratios_are_to_the_first_server() -> None:
    fast = Cell(ttft_ms=10, tpot_ms=2, longest_gap_ms=4, output_tokens_per_s=100, num_errors=0)
    slow = Cell(ttft_ms=25, tpot_ms=math.nan, longest_gap_ms=4, output_tokens_per_s=50, num_errors=1)
    table = Comparison(cell_by_server_by_row={"row": {"a": fast, "b": slow}}, errors=()).table()
    assert table.splitlines()[-1].split("|")[3:8] == [
        cell.rjust(width + 2 - 1) + " "
        for cell, width in zip(
            ["25.0 (2.50x)", "-", "4.00 (1.00x)", "50.0 (0.50x)", "1"], [12, 11, 14, 15, 6], strict=True
        )
    ]
    assert with_ratio(1.0, 0.0) == "1.00"


def test_the_json_says_what_was_asked_of_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "find_server", lambda server, _model: Server(name=server.name, url="", model="base"))
    monkeypatch.setattr(module, "compare", lambda *_, **_options: Comparison(cell_by_server_by_row={}, errors=()))
    monkeypatch.setattr("sys.argv", ["compare", "--url", "a=http://127.0.0.1:1", "--seed", "5", "--respect-eos"])
    module.main()
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"models": {"a": "base"}, "seed": 5, "repeats": 2, "ignore_eos": False, "rows": {}}


def test_the_module_starts_nobody() -> None:
    assert not hasattr(module, "subprocess")
