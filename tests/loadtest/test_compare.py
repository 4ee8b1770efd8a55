from __future__ import annotations

import json
import math
import threading

import pytest

from loadtest import compare as module
from loadtest.compare import (
    WORKLOADS,
    Cell,
    Comparison,
    Prompts,
    Server,
    compare,
    find_server,
    long_arrival,
    refuse_twice,
    shared_prefix,
    with_ratio,
)
from loadtest.stream_client import StreamClient
from loadtest.workloads import TokenRange
from tests.loadtest.scripted_server import MODELS, answer, scripted_server

IDS = TokenRange()
PROMPTS = Prompts(model="base", round_name="r", ids=IDS, ignore_eos=True)


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
        found = compare(servers, repeats=2, ids=IDS, ignore_eos=True, settle_s=0)

    def prompts(recorder: Recorder) -> list[str]:
        return sorted(json.dumps(body["prompt"]) for body in recorder.asked)

    assert prompts(ours) == prompts(theirs)
    assert len(set(prompts(ours))) == len(prompts(ours))
    assert {body["model"] for body in theirs.asked} == {"other"}
    assert list(found.cell_by_server_by_row) == [row for rows in WORKLOADS for row in rows]
    assert found.errors == ()
    assert found.table().count("\n") == 1 + 2 * len(found.cell_by_server_by_row)
    assert json.loads(found.to_json())["32 streams, same"].keys() == {"a", "b"}


def test_prompts_can_be_words_instead_of_token_ids() -> None:
    prompts = Prompts(model="base", round_name="r", ids=IDS, ignore_eos=True, words=(" ab", " cd", " ef"))
    ask = prompts.ask("w", [0, 4, 2, 300], 8)
    assert ask.body["prompt"] == " ab cd ef ab"


def test_the_warm_requests_share_the_cold_one_s_prefix() -> None:
    recorder = Recorder()
    with scripted_server(recorder) as url:
        (cold,), warm = shared_prefix(StreamClient(url, concurrency=8), PROMPTS)
    assert (cold.workload, [one.workload for one in warm]) == ("cold", ["warm"] * 4)
    prompts = [body["prompt"] for body in recorder.asked]
    assert len({tuple(prompt[:1024]) for prompt in prompts}) == 1  # type: ignore[index]
    assert len({tuple(prompt) for prompt in prompts}) == 5  # type: ignore[arg-type]


def test_the_long_prompt_arrives_after_the_others_have_begun() -> None:
    recorder = Recorder()
    with scripted_server(recorder) as url:
        decoding, (arrival,) = long_arrival(StreamClient(url, concurrency=8), PROMPTS)
    assert recorder.lengths() == [128] * 4 + [4096]
    assert all(one.started_s + one.event_ms[0] / 1000 <= arrival.started_s + 0.005 for one in decoding)


def test_a_refusal_is_shown_and_does_not_end_the_comparison() -> None:
    def refuse_long(body: dict[str, object]) -> list[bytes] | tuple[int, bytes]:
        if len(body["prompt"]) > 2000:  # type: ignore[arg-type]
            return 400, b'{"error": {"message": "too long"}}'
        return answer(body)

    with scripted_server(refuse_long) as url:
        found = compare([Server(name="a", url=url, model="base")], repeats=1, ids=IDS, ignore_eos=True, settle_s=0)
    assert found.errors == ("a, 4 decoding while 4,096 tokens arrive: HTTP 400: too long",)
    assert found.cell_by_server_by_row["the long prompt itself"]["a"].num_errors == 1
    assert json.loads(found.to_json())["the long prompt itself"]["a"]["TTFT p50 ms"] is None


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


def test_the_base_model_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_server() as url:
        assert find_server(f"ours={url}", None) == Server(name="ours", url=url, model="base")
        assert find_server(f"ours={url}", "capitals").model == "capitals"


def test_a_wrong_url_and_a_dead_server_are_said() -> None:
    for wrong in ("ours", "127.0.0.1:8000", "a=ftp://h:1", "http://h:x", "http://"):
        with pytest.raises(SystemExit, match="name=http"):
            find_server(wrong, None)
    with scripted_server() as url:
        pass
    with pytest.raises(SystemExit, match="ours does not answer"):
        find_server(f"ours={url}", None)
    with pytest.raises(SystemExit, match=f"{url} does not answer"):
        find_server(url, None)


def test_a_server_without_a_base_model_wants_its_model_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "data", [])
    with scripted_server() as url:
        with pytest.raises(SystemExit, match="ours lists no base model"):
            find_server(f"ours={url}", None)
        assert find_server(f"ours={url}", "m").model == "m"


def test_two_servers_of_one_name_are_refused() -> None:
    """One of them was asked twice, and the other never."""
    refuse_twice(["a", "b"])
    with pytest.raises(SystemExit, match="named 'a'"):
        refuse_twice(["a", "b", "a"])


def test_the_module_starts_nobody() -> None:
    assert not hasattr(module, "subprocess")
