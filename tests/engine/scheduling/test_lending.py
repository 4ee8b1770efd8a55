"""The cache lends what is free to adapters, and has it back when requests need it; no answer knows of either."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import ResolvedConfig
from engine.request import Request
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.test_backlog import backlog_of
from tests.engine.scripted import Harness, ScriptedGate, a_config, a_request
from tests.oracles.naive_scheduler import VOCAB_SIZE, answer_alone

CONFIG = a_config(num_blocks=32, max_num_seqs=8, max_batched_tokens=64, lent_run_blocks=4, max_lent_blocks=12)
"""Of 4 tokens a block; a request of full length has 16 blocks."""


def assert_right(harness: Harness, *requests: Request) -> None:
    for request in requests:
        alone = answer_alone(request, harness.config.max_model_len)
        assert harness.tokens(request.request_id) == alone.token_ids


def crowd(letters: str, **fields: object) -> list[Request]:
    return [a_request(f"r-{letter}", adapter=letter, **fields) for letter in letters]


def prompt(length: int) -> tuple[int, ...]:
    return tuple(number % VOCAB_SIZE for number in range(length))


def lent(scheduler: Scheduler) -> int:
    return scheduler._tables.num_lent


def test_adapters_that_find_no_room_are_lent_a_run_each_step_up_to_the_bound() -> None:
    harness = Harness(CONFIG, ScriptedGate(num_slots=1))
    requests = crowd("abcdef")
    harness.add(*requests)
    seen = []
    for _ in range(4):
        harness.step()
        seen.append(lent(harness.scheduler))
    assert seen == [0, 4, 8, 12]
    # The last ones first: those that were never used.
    assert [run.start for run in harness.gate.runs] == [28, 24, 20]
    assert harness.scheduler.kv_usage <= (32 - 12) / 32
    harness.finish()
    assert_right(harness, *requests)


def test_nothing_is_lent_where_nobody_lacks_room_or_nothing_may_be() -> None:
    for config, letters in ((CONFIG, "aa"), (a_config(lent_run_blocks=4), "ab"), (a_config(max_lent_blocks=9), "ab")):
        harness = Harness(config, ScriptedGate(num_slots=1))
        harness.add(*(a_request(str(i), adapter=letter) for i, letter in enumerate(letters)))
        harness.finish()
        assert lent(harness.scheduler) == 0


def test_half_of_the_cache_stays_free() -> None:
    harness = Harness(CONFIG, ScriptedGate(num_slots=1))
    # 13 of 32 blocks are held: without one more run 15 would be free.
    holder = a_request("long", prompt(52), max_tokens=8, adapter="a")
    harness.add(holder, *crowd("bc", max_tokens=1))
    for _ in range(4):
        harness.step()
        assert lent(harness.scheduler) == 0
    harness.finish()
    assert_right(harness, holder)


def test_a_request_that_needs_blocks_has_them_back_from_idle_adapters() -> None:
    harness = Harness(CONFIG, ScriptedGate(num_slots=1))
    few = crowd("abcd")
    harness.add(*few)
    harness.finish()
    assert lent(harness.scheduler) == 12
    large = [a_request(f"l{i}", prompt(40), max_tokens=20, salt=str(i)) for i in range(2)]
    harness.add(*large)
    harness.finish()
    # Each has 15 blocks in the end.
    assert lent(harness.scheduler) == 0
    assert_right(harness, *few, *large)


def test_adapters_in_use_keep_their_memory_and_who_needs_it_waits() -> None:
    harness = Harness(CONFIG, ScriptedGate(num_slots=1))
    users = crowd("abcd", max_tokens=50)
    harness.add(*users)
    for _ in range(5):
        harness.step()
    assert lent(harness.scheduler) == 12
    large = a_request("large", prompt(60), max_tokens=3)
    harness.add(large)
    harness.step()
    assert lent(harness.scheduler) == 12
    harness.finish()
    assert_right(harness, *users, large)


def test_the_door_counts_only_what_is_not_lent() -> None:
    harness = Harness(CONFIG, ScriptedGate(num_slots=1))
    harness.add(*crowd("abcd"))
    harness.finish()
    admission = harness.scheduler.admission
    backlog = backlog_of(harness, a_request("next"))
    assert admission._capacity(backlog, 1).num_blocks == 32 - lent(harness.scheduler) == 20


@st.composite
def scenes(draw: st.DrawFn) -> tuple[ResolvedConfig, ScriptedGate, list[tuple[int, Request]]]:
    config = a_config(
        num_blocks=draw(st.integers(20, 40)),
        max_num_seqs=6,
        max_batched_tokens=draw(st.sampled_from([8, 64])),
        enable_prefix_cache=draw(st.booleans()),
        lent_run_blocks=draw(st.integers(1, 4)),
    )
    most = config.num_blocks - config.max_blocks_per_request
    config = replace(config, max_lent_blocks=most)
    arrivals = []
    for number in range(draw(st.integers(4, 14))):
        is_large = draw(st.booleans())
        request = a_request(
            f"r{number}",
            prompt(draw(st.integers(20, 50)) if is_large else draw(st.integers(1, 6))),
            max_tokens=draw(st.integers(1, 12)),
            adapter=draw(st.sampled_from([None, "a"] if is_large else list("abcdef"))),
            salt=draw(st.sampled_from(["", str(number)])),
        )
        arrivals.append((draw(st.integers(0, 4)), request))
    return config, ScriptedGate(num_slots=draw(st.integers(1, 2))), arrivals


@given(scenes(), st.integers(0, 1))
@settings(max_examples=80, deadline=None)
def test_short_requests_of_many_adapters_and_long_ones_of_few_get_the_answers_they_get_alone(
    scene: tuple[ResolvedConfig, ScriptedGate, list[tuple[int, Request]]], steps_ahead: int
) -> None:
    config, gate, arrivals = scene
    harness = Harness(config, gate, steps_ahead=steps_ahead)
    for gap, request in arrivals:
        for _ in range(gap):
            harness.step()
        harness.add(request)
    harness.finish()
    assert_right(harness, *(request for _, request in arrivals))
    assert lent(harness.scheduler) == sum(map(len, gate.runs)) <= config.max_lent_blocks
